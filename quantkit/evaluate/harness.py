"""lm-eval does the asking and the scoring; what is added is the check of the real tokens, and the sandbox."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from quantkit.errors import ArtifactError, Fault, PlanError, ToolError
from quantkit.evaluate import sandbox
from quantkit.evaluate.fingerprint import leading_bos
from quantkit.evaluate.suites import ChoiceSuite, CodeSuite
from quantkit.records import TaskScore

TASKS = Path(__file__).parent / "tasks"


class CheckedLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """The model as lm-eval sees it; refuses prompts that do not fit, and rows with a missing or second BOS."""

    def __init__(self, model: Any, tokenizer: Any, batch: int) -> None:
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            what = "the tokenizer names neither a BOS nor an EOS token, so lm-eval cannot ask"
            do = "name its eos_token in tokenizer_config.json, or leave this suite out"
            raise ArtifactError(Fault(what, str(tokenizer.name_or_path), do))
        self.bos = leading_bos(tokenizer)
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch,
            add_bos_token=bool(self.bos),
            softmax_dtype="float32",
        )

    def loglikelihood(self, requests: Any, **kwargs: Any) -> Any:
        self._require_room(max(len(self.tok_encode(request.args[0] + request.args[1])) for request in requests))
        return super().loglikelihood(requests, **kwargs)

    def generate_until(self, requests: Any, **kwargs: Any) -> Any:
        answer = max(request.args[1]["max_gen_toks"] for request in requests)
        self._require_room(answer + max(len(self.tok_encode(request.args[0])) for request in requests))
        return super().generate_until(requests, **kwargs)

    def _model_call(self, inps: Any, **kwargs: Any) -> Any:
        self._require_bos(inps, torch.ones_like(inps))
        return super()._model_call(inps, **kwargs)

    def _model_generate(self, context: Any, **kwargs: Any) -> Any:
        self._require_bos(context, kwargs["attention_mask"])
        return super()._model_generate(context, **kwargs)

    def _require_room(self, tokens: int) -> None:
        # lm-eval would cut the prompt at its beginning, with a warning.
        if tokens > self.max_length:
            what = f"the longest prompt and its answer need {tokens} tokens, the model has {self.max_length} positions"
            raise PlanError(Fault(what, "evaluate.suites", "leave this suite out, or lower max_gen_toks in its YAML"))

    def _require_bos(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return
        first_B = mask_BT.long().argmax(dim=1)
        rows_B = torch.arange(ids_BT.shape[0])
        second_B = (first_B + 1).clamp(max=ids_BT.shape[1] - 1)
        found_B = (ids_BT[rows_B, first_B] == bos).long()
        found_B += found_B * (second_B > first_B) * (ids_BT[rows_B, second_B] == bos)
        if not bool((found_B == self.bos).all()):
            what = f"a prompt begins with {found_B.tolist()} BOS tokens where the tokenizer's rule is {self.bos}"
            raise ArtifactError(
                Fault(what, "the tokenizer, or a prompt of this suite", "keep BOS out of the prompt's text")
            )


def run(
    suite: ChoiceSuite | CodeSuite, model: Any, tokenizer: Any, limit: int | None, guard: sandbox.Guard | None
) -> tuple[TaskScore, list[dict[str, Any]]]:
    """Ask all items of a suite. Returns the score and {"id", "task", "correct", ...} of each item, in order.

    Raises: ToolError: the hub cannot be reached, or its task has another version.
            PlanError: a prompt is longer than the model's positions.
    """
    own = TASKS / f"{suite.task}.yaml"
    spec: Any = load_yaml(own) if own.is_file() else suite.task
    generation: dict[str, Any] | None = None
    if isinstance(suite, CodeSuite) and guard:
        judge = {"function": "custom", "filter_fn": _tests(suite, guard)}
        spec["filter_list"] = [{"name": "sandbox", "filter": [judge]}]
        generation = {
            "until": list(suite.generation.until),
            "max_gen_toks": suite.generation.max_gen_toks,
            "do_sample": False,
        }
    with _quiet():
        # The tasks that lm-eval brings are 13,000 files, read in 10 s: only where one is named.
        manager = TaskManager(include_defaults=isinstance(spec, str))
        results = lm_eval.simple_evaluate(
            model=CheckedLM(model, tokenizer, suite.batch),
            tasks=[_load(suite, spec, manager)],
            task_manager=manager,
            num_fewshot=suite.shots,
            apply_chat_template=suite.template,
            gen_kwargs=generation,
            limit=None if limit is None else max(1, limit // suite.parts),
            random_seed=suite.seed,
            numpy_random_seed=suite.seed,
            torch_random_seed=suite.seed,
            fewshot_random_seed=suite.seed,
            bootstrap_iters=0,
        )
    found = float(results["versions"][suite.task])
    if found != suite.version:
        what = f"lm-eval's task {suite.task} has version {found}, the suite says {suite.version}"
        raise ToolError(Fault(what, f"evals/{suite.name}.yaml: version", "correct the suite, or install its lm-eval"))
    items = [_item(suite, sample) for samples in results["samples"].values() for sample in samples]
    metrics = results["results"][suite.task].items()
    # lm-eval names a value by its metric and filter: "acc,none", "pass@1,sandbox".
    value = next(float(number) for name, number in metrics if name.split(",")[0] == suite.metric)
    n = len(items)
    if abs(value - sum(item["correct"] for item in items) / n) > 1e-9:
        raise ToolError(Fault(f"lm-eval's score {value} is not that of its items", suite.name, "report this"))
    stderr = (value * (1 - value) / max(1, n - 1)) ** 0.5
    return TaskScore(metric=suite.metric, value=value, stderr=stderr, n=n, chance=suite.chance), items


def _load(suite: ChoiceSuite | CodeSuite, spec: Any, manager: TaskManager) -> Any:
    """lm-eval's task or group object, its items read. Raises ToolError: the hub did not give them."""
    try:
        loaded = manager.load([spec])
    except (OSError, ValueError) as error:
        if not suite.hub:
            raise
        instead = {"mmlu": "mmlu-dev", "humaneval-hub": "humaneval"}.get(suite.name, "a suite of an installed package")
        do = f"connect to huggingface.co, or use {instead}, which needs no network"
        what = f"the items of {suite.task} did not come from the hub: {error}"
        raise ToolError(Fault(what, f"evals/{suite.name}.yaml", do)) from None
    return loaded["groups"].get(suite.task) or loaded["tasks"][suite.task]


def _item(suite: ChoiceSuite | CodeSuite, sample: Any) -> dict[str, Any]:
    doc = sample["doc"]
    own = doc.get("id") or doc.get("task_id") or f"{doc.get('subject', suite.task)}/{sample['doc_id']}"
    item: dict[str, Any] = {"id": own, "task": suite.name, "correct": int(sample[suite.metric])}
    if isinstance(suite, CodeSuite):
        return {**item, "answer": sample["resps"][0][0]}
    return {**item, "target": sample["target"], "loglikelihoods": [float(pair[0]) for pair in sample["filtered_resps"]]}


def program(doc: dict[str, Any], answer: str) -> str:
    """The problem as it was asked, an answer, and the problem's own tests, as one program."""
    return f"{doc['prompt'].rstrip()}{answer}\n\n{doc['test']}\n\ncheck({doc['entry_point']})\n"


def _tests(suite: CodeSuite, guard: sandbox.Guard) -> Callable[[Any, Any], list[bool]]:
    """An lm-eval filter: every answer becomes whether its tests passed."""

    def run_tests(resps: Any, docs: Any) -> list[bool]:
        programs = [program(doc, answers[0]) for doc, answers in zip(docs, resps, strict=True)]
        results = sandbox.run_all(programs, guard, suite.sandbox.to_sandbox(), f"{suite.name} tests")
        return [result.ending == "finished" for result in results]

    return run_tests


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval's and transformers' notes say nothing that the settings do not; their errors are raised."""
    names = ("lm_eval", "transformers", "datasets")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
