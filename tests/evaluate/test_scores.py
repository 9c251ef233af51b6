"""Scores against arithmetic of their own: log-likelihoods, perplexity and KL from the model's logits by hand."""

import json
import math

import pytest
import torch
from torch.nn import functional

from quantkit.errors import ArtifactError, PlanError, ToolError
from quantkit.evaluate import harness, items, perplexity, sandbox
from quantkit.evaluate.fingerprint import fingerprint, leading_bos, settings_of, tokenizer_digest
from quantkit.evaluate.run import evaluate, read_items
from quantkit.evaluate.suites import load_suite

MMLU, CODE, TEXT = load_suite("mmlu-dev"), load_suite("humaneval"), load_suite("perplexity")
SMALL = TEXT.model_copy(update={"windows": 4, "length": 200})
HELD_OUT = ["".join(chr(97 + (n * n + d) % 26) if n % 7 else " " for n in range(700)) for d in range(5)]


def perturbed(model, amount):
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for weight in other.parameters():
            weight += amount * weight.abs().mean() * torch.randn(weight.shape, generator=generator)
    return other


@pytest.mark.parametrize("leading", [0, 1])
def test_choices_are_scored_as_by_hand(leading, make_model, make_tokenizer, tmp_path):
    model, tokenizer = make_model(), make_tokenizer(leading)
    scores = evaluate(MMLU, model, tokenizer, variant="source", out=tmp_path, limit=20)
    rows = read_items(tmp_path, scores)
    right = 0
    for row, item in zip(rows, items.questions()[:20], strict=True):
        subject = " ".join(item["subject"].split("_"))
        prompt = f"The following are multiple choice questions (with answers) about {subject}.\n\n{item['question']}\n"
        prompt += (
            "".join(f"{letter}. {text}\n" for letter, text in zip("ABCD", item["choices"], strict=True)) + "Answer:"
        )
        ids = [0] * leading + tokenizer(prompt, add_special_tokens=False)["input_ids"]
        logits_V = model(torch.tensor([ids])).logits[0, -1].detach().double()
        expected = [float(logits_V[258 + n] - logits_V.logsumexp(0)) for n in range(4)]
        assert row["loglikelihoods"] == pytest.approx(expected, abs=2e-4)
        assert row["id"] == item["id"]
        assert row["correct"] == (max(range(4), key=expected.__getitem__) == item["answer"])
        right += row["correct"]
    score = scores.tasks["mmlu-dev"]
    assert (score.value, score.n, score.chance) == (right / 20, 20, 0.25)
    assert score.stderr == pytest.approx(math.sqrt(right / 20 * (1 - right / 20) / 19))
    assert scores.limit == 20


def test_perplexity_is_the_exponential_of_the_mean_cross_entropy(make_model, make_tokenizer, tmp_path):
    model, tokenizer = make_model(), make_tokenizer()
    reference = perplexity.Reference(model)
    scores = evaluate(SMALL, model, tokenizer, variant="source", out=tmp_path, reference=reference, held_out=HELD_OUT)
    ids = tokenizer("\n\n".join(HELD_OUT))["input_ids"]
    available = len(ids) // 200
    windows = [ids[200 * (n * available // 4) :][:200] for n in range(4)]
    logits = model(torch.tensor(windows)).logits
    losses = functional.cross_entropy(logits[:, :-1].reshape(-1, 264), torch.tensor(windows)[:, 1:].reshape(-1))
    assert scores.tasks["perplexity"].value == pytest.approx(float(losses.detach().exp()), rel=1e-5)
    assert (scores.tasks["kl"].value, scores.tasks["top1_agreement"].value) == (0, 1)
    rows = read_items(tmp_path, scores)
    assert [len(row["nll"]) for row in rows] == [199] * 4
    mean = sum(sum(row["nll"]) for row in rows) / (4 * 199)
    assert scores.tasks["perplexity"].value == pytest.approx(math.exp(mean), rel=1e-6)


def test_kl_is_zero_for_itself_and_grows_with_the_perturbation(make_model, make_tokenizer, tmp_path):
    model, tokenizer = make_model(), make_tokenizer()
    found, reference = [], perplexity.Reference(model)
    for amount in (0, 0.02, 0.2):
        variant = perturbed(model, amount)
        scores = evaluate(
            SMALL, variant, tokenizer, variant="v", out=tmp_path / str(amount), reference=reference, held_out=HELD_OUT
        )
        rows = read_items(tmp_path / str(amount), scores)
        ids_WT = perplexity.windows_of(SMALL, "\n\n".join(HELD_OUT), tokenizer, None)
        log_WTV, source_WTV = (m(ids_WT).logits[:, :-1].log_softmax(-1) for m in (variant, model))
        expected = functional.kl_div(log_WTV, source_WTV, log_target=True, reduction="none").sum(-1)
        assert torch.tensor([row["kl"] for row in rows]) == pytest.approx(expected.detach(), abs=1e-5)
        agree = (log_WTV.argmax(-1) == source_WTV.argmax(-1)).float()
        assert scores.tasks["top1_agreement"].value == pytest.approx(float(agree.mean()))
        found.append(scores.tasks["kl"].value)
    assert found[0] == 0
    assert 0 < found[1] < found[2]


def test_logits_that_are_kept_change_no_score(make_model, make_tokenizer, monkeypatch):
    model = make_model()
    ids_WT = perplexity.windows_of(SMALL, "\n\n".join(HELD_OUT), make_tokenizer(), None)
    kept = perplexity.Reference(model)
    first = list(perplexity.measure(perturbed(model, 0.1), ids_WT, kept))
    again = list(perplexity.measure(perturbed(model, 0.1), ids_WT, kept))
    monkeypatch.setattr(perplexity, "_KEPT", 0)
    assert first == again == list(perplexity.measure(perturbed(model, 0.1), ids_WT, perplexity.Reference(model)))


def test_windows_begin_with_the_bos_that_the_tokenizer_asks_for(make_tokenizer):
    for leading in (0, 1):
        ids_WT = perplexity.windows_of(SMALL, "\n\n".join(HELD_OUT), make_tokenizer(leading), 3)
        assert ids_WT.shape == (3, 200)
        assert bool(((ids_WT == 0).sum(dim=1) == leading).all())
        assert bool((ids_WT[:, :leading] == 0).all())


def test_too_little_text_and_too_few_positions_are_refused(make_model, make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    with pytest.raises(PlanError, match="not 4"):
        evaluate(SMALL, make_model(), tokenizer, variant="source", out=tmp_path, held_out=["short"])
    with pytest.raises(PlanError, match="keeps no documents"):
        evaluate(SMALL, make_model(), tokenizer, variant="source", out=tmp_path, held_out=[])
    narrow = make_model(max_position_embeddings=128)
    with pytest.raises(PlanError, match="128 positions"):
        evaluate(SMALL, narrow, tokenizer, variant="source", out=tmp_path, held_out=HELD_OUT)
    with pytest.raises(PlanError, match="128 positions"):
        evaluate(MMLU, narrow, tokenizer, variant="source", out=tmp_path, limit=2)
    assert not list(tmp_path.iterdir())


def test_logits_that_are_no_numbers_are_refused(make_model, make_tokenizer, tmp_path):
    broken = make_model()
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    with pytest.raises(ArtifactError, match="not finite"):
        evaluate(SMALL, broken, make_tokenizer(), variant="v", out=tmp_path, held_out=HELD_OUT)


def test_two_bos_tokens_are_refused(make_model, make_tokenizer, tmp_path):
    with pytest.raises(ArtifactError, match="2 BOS"):
        evaluate(MMLU, make_model(), make_tokenizer(2), variant="source", out=tmp_path, limit=2)
    assert [leading_bos(make_tokenizer(leading)) for leading in (0, 1)] == [0, 1]


def test_a_tokenizer_without_bos_and_eos_is_refused(make_model, make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ArtifactError, match="neither a BOS nor an EOS"):
        evaluate(MMLU, make_model(), tokenizer, variant="source", out=tmp_path, limit=2)


@pytest.mark.parametrize(
    ("leading", "rows", "mask", "good"),
    [
        (1, [[0, 5, 6], [0, 7, 8]], [[1, 1, 1], [1, 1, 1]], True),
        (1, [[1, 0, 6], [0, 7, 8]], [[0, 1, 1], [1, 1, 1]], True),
        (1, [[0, 0, 6], [0, 7, 8]], [[1, 1, 1], [1, 1, 1]], False),
        (1, [[5, 6, 7], [0, 7, 8]], [[1, 1, 1], [1, 1, 1]], False),
        (0, [[5, 6, 7]], [[1, 1, 1]], True),
        (0, [[1, 0, 7]], [[0, 1, 1]], False),
    ],
)
def test_the_rows_that_the_model_sees_are_checked(leading, rows, mask, good, make_model, make_tokenizer):
    lm = harness.CheckedLM(make_model(), make_tokenizer(leading), 1)
    if good:
        lm._require_bos(torch.tensor(rows), torch.tensor(mask))
    else:
        with pytest.raises(ArtifactError, match="BOS"):
            lm._require_bos(torch.tensor(rows), torch.tensor(mask))


def test_the_fingerprint_moves_with_every_setting_and_not_with_the_weights(make_model, make_tokenizer):
    def of(suite=CODE, model=None, leading=0, limit=5, data="d", guard="namespaces", extra=""):
        tokenizer = make_tokenizer(leading, extra)
        return settings_of(suite, model or make_model(), tokenizer, limit=limit, data=data, guard=guard)

    changes = [
        {},
        *(
            {"suite": CODE.model_copy(update=update)}
            for update in (
                {"shots": 1},
                {"template": True},
                {"seed": 1},
                {"batch": 2},
                {"version": 2.0},
                {"generation": CODE.generation.model_copy(update={"max_gen_toks": 9})},
                {"generation": CODE.generation.model_copy(update={"until": ("\n",)})},
                {"sandbox": CODE.sandbox.model_copy(update={"cpu_seconds": 9})},
            )
        ),
        {"model": make_model().to(torch.bfloat16)},
        {"leading": 1},
        {"limit": None},
        {"data": "e"},
        {"guard": "rlimits"},
        {"extra": "</s>"},
    ]
    assert len({fingerprint(of(**change)) for change in changes}) == len(changes)
    assert fingerprint(of(model=make_model(seed=7))) == fingerprint(of())


def test_using_a_tokenizer_does_not_change_its_digest(make_tokenizer):
    tokenizer = make_tokenizer()
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding="longest", truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == before != tokenizer_digest(make_tokenizer(1))


def test_a_finished_suite_of_the_same_artifact_is_not_run_again(make_model, make_tokenizer, tmp_path, monkeypatch):
    model, tokenizer = make_model(), make_tokenizer()
    keep = {"variant": "v", "out": tmp_path, "limit": 3}
    first = evaluate(MMLU, model, tokenizer, artifact="a", **keep)
    monkeypatch.setattr(harness, "run", lambda *_: 1 / 0)
    assert evaluate(MMLU, model, tokenizer, artifact="a", **keep) == first
    for change in ({"artifact": "b"}, {"artifact": None}, {"artifact": "a", "limit": 2}):
        with pytest.raises(ZeroDivisionError):
            evaluate(MMLU, model, tokenizer, **{**keep, **change})


needs_guard = pytest.mark.skipif(
    not any(map(sandbox.works, ("bubblewrap", "namespaces"))), reason="this machine permits no sandbox"
)


@needs_guard
def test_every_published_solution_passes_and_none_passes_when_it_returns_nothing():
    problems = items.problems()
    right = [harness.program(doc, "\n" + doc["canonical_solution"]) for doc in problems]
    wrong = [harness.program(doc, "\n    return None\n") for doc in problems[:20]]
    results = sandbox.run_all(right + wrong, sandbox.find_guard(), CODE.sandbox.to_sandbox(), "canonical")
    assert [result.ending for result in results[:164]] == ["finished"] * 164
    assert "finished" not in [result.ending for result in results[164:]]


@needs_guard
def test_code_is_scored_through_lm_eval(make_model, make_tokenizer, tmp_path, monkeypatch):
    """Three of five answers are right; the stop strings and the length are those of the suite."""
    docs = items.problems()[:5]
    answers = ["\n" + doc["canonical_solution"] if n < 3 else "\n    return 0\n" for n, doc in enumerate(docs)]

    def answer(self, requests, **_):
        assert [request.args[0] for request in requests] == [doc["prompt"].rstrip() for doc in docs]
        assert all(request.args[1]["until"] == list(CODE.generation.until) for request in requests)
        assert all(request.args[1]["max_gen_toks"] == CODE.generation.max_gen_toks for request in requests)
        return answers

    monkeypatch.setattr(harness.CheckedLM, "generate_until", answer)
    scores = evaluate(CODE, make_model(), make_tokenizer(), variant="source", out=tmp_path, limit=5)
    assert (scores.tasks["humaneval"].value, scores.tasks["humaneval"].n) == (0.6, 5)
    assert [row["correct"] for row in read_items(tmp_path, scores)] == [1, 1, 1, 0, 0]
    assert scores.guard == sandbox.find_guard()


@needs_guard
def test_code_is_generated_greedily_whatever_the_batch(make_model, make_tokenizer, tmp_path):
    """Left padding must not reach the answer: a batch of three writes what each prompt alone gets."""
    short = CODE.generation.model_copy(update={"max_gen_toks": 12})
    suite = CODE.model_copy(update={"generation": short, "batch": 3})
    model, tokenizer = make_model(), make_tokenizer()
    rows = read_items(tmp_path, evaluate(suite, model, tokenizer, variant="source", out=tmp_path, limit=3))
    for row, doc in zip(rows, items.problems()[:3], strict=True):
        ids = tokenizer(doc["prompt"].rstrip())["input_ids"]
        written = []
        while len(written) < 12:
            written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
            if written[-1] == 1:
                break
        text = tokenizer.decode([token for token in written if token > 1])
        assert row["answer"] == min((text.split(stop)[0] for stop in suite.generation.until), key=len)


def test_a_hub_that_is_out_of_reach_names_the_local_form(make_model, make_tokenizer, tmp_path, monkeypatch):
    import datasets

    def unreachable(*_, **__):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    suite = load_suite("humaneval-hub")
    with pytest.raises(ToolError, match="no route to the hub") as caught:
        evaluate(suite, make_model(), make_tokenizer(), variant="source", out=tmp_path, allow_unsandboxed=True)
    assert "use humaneval," in caught.value.faults[0].do


def test_the_files_hold_what_the_contract_names(make_model, make_tokenizer, tmp_path):
    evaluate(MMLU, make_model(), make_tokenizer(), variant="source", out=tmp_path, limit=2)
    record = json.loads((tmp_path / "mmlu-dev.json").read_text())
    assert {"suite", "fingerprint", "backend", "tasks", "items"} <= set(record)
    assert set(record["tasks"]["mmlu-dev"]) >= {"metric", "value", "stderr", "n"}
    rows = [json.loads(line) for line in (tmp_path / record["items"]).read_text().splitlines()]
    assert [set(row) >= {"id", "task", "correct"} for row in rows] == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mmlu-dev.items.jsonl", "mmlu-dev.json"]
