"""The one pass: every block is read and run once, and every variant is solved from its statistics.

Order of a block, so that a kill at any moment loses one block at most: shards of every variant, the hidden states
entering the next block, then the record that calls the block done, then the ledger. All files appear whole.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from quantkit.calibrate.blocks import build_block, embed, run_block
from quantkit.checkpoint.read import Weights
from quantkit.checkpoint.write import finish, shard_name, write_shard
from quantkit.engines.folders import Key, complete, fused_names, scratch, seal
from quantkit.engines.variant import solve_block
from quantkit.engines.verify import verify_artifact
from quantkit.families import Family, family_of
from quantkit.pack import FORMATS
from quantkit.records import Index, LedgerLine, Plan, Record, VariantPlan, write_text

_BATCH_TOKENS = 4096


class _Done(Record):
    """A finished block of a run, on disk."""

    lines: tuple[LedgerLine, ...]
    digests: dict[str, dict[str, str]]
    """By variant and module."""
    changed: dict[str, tuple[str, ...]]
    """By variant: tensors that folding altered."""


def quantize(index: Index, plan: Plan, tokens_SL: Tensor, artifacts: Path, ledger: Path, recipe_digest: str) -> None:
    """Make every variant of the plan: artifacts/<variant>/ with its manifest, and the ledger.

    Called again after a kill it continues after the last finished block, and the files come out the same.

    Args:    tokens_SL: int64 token ids, samples by length, no padding.
    Raises:  SolveError naming a module. ArtifactError: what was written does not read back, or another run's
             artifact stands in the way.
    """
    family = family_of(index.config)
    blocks = family.blocks(index.config)
    folders = {variant.name: artifacts / variant.name for variant in plan.variants}
    if ledger.exists() and all(complete(folder, recipe_digest) for folder in folders.values()):
        return
    tokens = hashlib.sha256(tokens_SL.contiguous().numpy().tobytes()).hexdigest()
    work = scratch(artifacts, folders, Key(recipe=recipe_digest, tokens=tokens))
    with Weights(index) as weights:
        first, hidden_SLD = _take_up(work, weights, family, blocks, tokens_SL)
        bar = tqdm(range(first, blocks), "quantize", blocks, initial=first, unit="block", file=sys.stderr)
        for block in bar:
            done = _one_block(index, plan, family, weights, block, hidden_SLD, folders)
            _save_hidden(work, block + 1, hidden_SLD)
            _commit(work, block, done)
            _write_ledger(ledger, work, block + 1)
            _hidden_path(work, block).unlink(missing_ok=True)
        for variant in plan.variants:
            _close(index, variant, family, weights, work, folders[variant.name], recipe_digest)
    _write_ledger(ledger, work, blocks)
    shutil.rmtree(work)


def _one_block(
    index: Index,
    plan: Plan,
    family: Family,
    weights: Weights,
    block: int,
    hidden_SLD: Tensor,
    folders: Mapping[str, Path],
) -> _Done:
    """Run one block (its output replaces `hidden_SLD`), solve it for every variant, write their shards."""
    prefix = family.prefix(block)
    source = {name.removeprefix(prefix): weights.get(name) for name in index.tensors if name.startswith(prefix)}
    decoder = build_block(index.config, source, block, hidden_SLD)
    batch = max(1, _BATCH_TOKENS // hidden_SLD.shape[1])
    statistics = run_block(decoder, hidden_SLD, family, batch=batch, where=prefix)
    lines: list[LedgerLine] = []
    digests, changed = {}, {}
    for variant in plan.variants:
        solved = solve_block(variant, family, index.config, prefix, source, statistics)
        write_shard(folders[variant.name] / shard_name(block + 1, family.blocks(index.config) + 1), solved.tensors)
        lines += solved.lines
        digests[variant.name] = solved.digests
        changed[variant.name] = solved.changed
    return _Done(lines=tuple(lines), digests=digests, changed=changed)


def _close(
    index: Index,
    variant: VariantPlan,
    family: Family,
    weights: Weights,
    work: Path,
    folder: Path,
    recipe_digest: str,
) -> None:
    """The last shard, the files beside the shards, the index; then everything is read back; then the manifest."""
    blocks = family.blocks(index.config)
    prefixes = tuple(family.prefix(block) for block in range(blocks))
    rest = {name: weights.get(name) for name in index.tensors if not name.startswith(prefixes)}
    write_shard(folder / shard_name(blocks + 1, blocks + 1), rest)
    fused = fused_names(family.fused, family.fused_names, variant.ignored)
    routers = (prefix + name for prefix in prefixes for name in family.routers)
    kept = variant.model_copy(update={"ignored": (*variant.ignored, *routers)})
    shards = [shard_name(number + 1, blocks + 1) for number in range(blocks + 1)]
    finish(folder, index, shards, FORMATS[variant.format].config(kept, fused))
    done = [_Done.read(_done_path(work, block)) for block in range(blocks)]
    digests = {module: found for record in done for module, found in record.digests[variant.name].items()}
    changed = {name for record in done for name in record.changed[variant.name]}
    verify_artifact(folder, index, variant, digests, changed)
    seal(folder, index, variant, recipe_digest)


# The scratch folder: artifacts/.work/{key.json, block-N.json, hidden-N.safetensors}


def _take_up(work: Path, weights: Weights, family: Family, blocks: int, tokens_SL: Tensor) -> tuple[int, Tensor]:
    """The first block that is not done, and the hidden states that enter it."""
    first = next((block for block in range(blocks) if not _done_path(work, block).exists()), blocks)
    if first == 0:
        return 0, embed(family, weights.get(f"{family.embedding}.weight"), tokens_SL)
    with safe_open(_hidden_path(work, first), framework="pt") as file:
        hidden_SLD: Tensor = file.get_tensor("hidden")
        return first, hidden_SLD.clone()


def _save_hidden(work: Path, block: int, hidden_SLD: Tensor) -> None:
    write_shard(_hidden_path(work, block), {"hidden": hidden_SLD})


def _commit(work: Path, block: int, done: _Done) -> None:
    """From here on the block counts as finished."""
    done.write(_done_path(work, block))


def _write_ledger(ledger: Path, work: Path, blocks: int) -> None:
    lines = [line for block in range(blocks) for line in _Done.read(_done_path(work, block)).lines]
    write_text(ledger, "".join(line.model_dump_json() + "\n" for line in lines))


def _done_path(work: Path, block: int) -> Path:
    return work / f"block-{block}.json"


def _hidden_path(work: Path, block: int) -> Path:
    return work / f"hidden-{block}.safetensors"
