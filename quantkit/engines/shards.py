"""Passthrough: what needs no forward, made of any safetensors checkpoint, shard by shard.

Every byte of the source is read once, whatever the number of variants: a piece of a tensor's rows is read, quantized
for each variant and kept until its tensor is packed; what is not quantized is copied. Memory is bounded by the largest
linear. A kill loses the shard at work: a shard is finished for all variants, then its record is written.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from quantkit.checkpoint.index import read_index
from quantkit.checkpoint.stream import DTYPES, Draft, Pieces, info
from quantkit.checkpoint.write import finish
from quantkit.engines.codes import EIGHT_BIT, dense, eight_bits
from quantkit.engines.folders import Key, complete, fused_names, scratch, seal
from quantkit.engines.verify import expected_names
from quantkit.errors import ArtifactError, Fault, SolveError
from quantkit.pack import FORMATS, Codes
from quantkit.plan.anymodel import FUSED, FUSED_NAMES
from quantkit.records import Index, LedgerLine, Plan, Record, TensorInfo, VariantPlan, write_text
from quantkit.solve.rtn import rtn

_PIECE = 2 << 20
"""Bytes of the source that one thread works on at a time, about: they and their float32 copies fit its cache."""
_ROWS = 128
"""Rows of a piece are a multiple of this, so that no block of FP8 and no packed word is cut."""


class _Done(Record):
    """A finished shard of a run, on disk."""

    lines: tuple[LedgerLine, ...]


def quantize(index: Index, plan: Plan, artifacts: Path, ledger: Path, recipe_digest: str) -> None:
    """Make every variant of the plan: artifacts/<variant>/ with the source's shard names, manifest, and the ledger.

    Called again after a kill it continues after the last finished shard, and the files come out the same.

    Raises:  SolveError naming a module whose weights or scales are not finite. ArtifactError: what was written does
             not read back, or another run's artifact stands in the way.
    """
    folders = {variant.name: artifacts / variant.name for variant in plan.variants}
    if ledger.exists() and all(complete(folder, recipe_digest) for folder in folders.values()):
        return
    work = scratch(artifacts, folders, Key(recipe=recipe_digest))
    files = sorted({tensor.file for tensor in index.tensors.values()})
    with tqdm(total=index.bytes, desc="quantize", unit="B", unit_scale=True, file=sys.stderr) as bar, _pool() as pool:
        for number, file in enumerate(files):
            if not _done_path(work, number).exists():
                lines = _one_shard(index, plan.variants, file, folders, pool)
                _commit(work, number, _Done(lines=tuple(lines)))
                _write_ledger(ledger, work, number + 1)
            bar.update(sum(tensor.bytes for tensor in index.tensors.values() if tensor.file == file))
    for variant in plan.variants:
        folder = folders[variant.name]
        fused = fused_names(FUSED, FUSED_NAMES, variant.ignored)
        finish(folder, index, files, FORMATS[variant.format].config(variant, fused))
        if set(read_index(folder, quantized_ok=True).tensors) != expected_names(index, variant):
            do = "delete the variant's folder and run the command again; if it stays, report it"
            raise ArtifactError(Fault("the tensors are not those that the plan names", str(folder), do))
        seal(folder, index, variant, recipe_digest)
    _write_ledger(ledger, work, len(files))
    shutil.rmtree(work)


def quantize_rows(variant: VariantPlan, weight_OI: Tensor) -> Codes:
    """Codes of some rows, whose scales depend on no other row. Scales are stored in the dtype of `weight_OI`."""
    dtype = weight_OI.dtype if weight_OI.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    if variant.method in EIGHT_BIT:
        return eight_bits(variant.method, variant.scheme, [weight_OI], dtype)[0]
    codes_OI, grid = rtn(
        weight_OI.float(), variant.group_size, symmetric=variant.symmetric, dtype=dtype, bits=variant.bits
    )
    zero_OG = None if variant.symmetric else grid.zero_OG.to(torch.uint8)
    return Codes(codes_OI, grid.scale_OG.to(dtype), zero_OG, variant.bits)


@dataclass(frozen=True)
class _Part:
    """Some rows of one linear for one variant, quantized."""

    codes: Codes
    lost: float
    """Sum of squares of weight minus what is stored; `norm`: of the weight."""
    norm: float


def _one_shard(
    index: Index,
    variants: tuple[VariantPlan, ...],
    file: str,
    folders: Mapping[str, Path],
    pool: ThreadPoolExecutor,
) -> list[LedgerLine]:
    """Write the shard of every variant; returns the ledger's lines, by variant and name."""
    tensors = {name: tensor for name, tensor in index.tensors.items() if tensor.file == file}
    linears = {variant.name: {f"{module.name}.weight" for module in variant.modules} for variant in variants}
    lines = []
    with ExitStack() as stack:
        source = stack.enter_context(Pieces(index.root / file))
        drafts = {
            variant.name: stack.enter_context(
                Draft(folders[variant.name] / file, _layout(variant, tensors, linears[variant.name]))
            )
            for variant in variants
        }
        for name in sorted(tensors, key=source.starts.__getitem__):
            solving = [variant for variant in variants if name in linears[variant.name]]
            copying = [drafts[variant.name] for variant in variants if name not in linears[variant.name]]
            read = _reader(source, name, tensors[name], solving, copying)
            parts = list(pool.map(read, _spans(tensors[name], bool(solving))))
            for place, variant in enumerate(solving):
                own = [part[place] for part in parts]
                lines.append(_line(variant, name.removesuffix(".weight"), own))
                _put(drafts[variant.name], variant, name.removesuffix(".weight"), own, pool)
        for draft in drafts.values():
            draft.finish()
    return sorted(lines, key=lambda line: (line.variant, line.module))


def _layout(variant: VariantPlan, tensors: Mapping[str, TensorInfo], linears: set[str]) -> dict[str, TensorInfo]:
    """What the variant stores of a shard's tensors: from shapes alone, by running the same code without numbers."""
    known: dict[tuple[str, tuple[int, ...]], dict[str, TensorInfo]] = {}
    layout = {}
    for name, tensor in tensors.items():
        if name not in linears:
            layout[name] = tensor
            continue
        kind = (tensor.dtype, tensor.shape)
        if kind not in known:
            empty_OI = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")
            packed = FORMATS[variant.format].pack(quantize_rows(variant, empty_OI))
            known[kind] = {end: info(made, tensor.file) for end, made in packed.items()}
        layout |= {f"{name.removesuffix('.weight')}.{end}": made for end, made in known[kind].items()}
    return layout


def _spans(tensor: TensorInfo, by_rows: bool) -> list[tuple[int, int]]:
    """Where the pieces of a tensor begin and end, in bytes."""
    step = _PIECE
    if by_rows:
        row_bytes = tensor.bytes // tensor.shape[0]
        step = row_bytes * _ROWS * max(1, _PIECE // (row_bytes * _ROWS))
    return [(start, min(start + step, tensor.bytes)) for start in range(0, tensor.bytes, step)]


def _reader(
    source: Pieces, name: str, tensor: TensorInfo, solving: list[VariantPlan], copying: list[Draft]
) -> Callable[[tuple[int, int]], list[_Part]]:
    """What a thread does with a piece of a tensor: read it, copy it, quantize it for each of `solving`."""

    def read(span: tuple[int, int]) -> list[_Part]:
        raw = torch.empty(span[1] - span[0], dtype=torch.uint8)
        source.read(name, span[0], raw)
        for draft in copying:
            draft.put(name, span[0], raw)
        if not solving:
            return []
        weight_OI = raw.view(DTYPES[tensor.dtype]).view(-1, tensor.shape[1])
        parts = []
        for variant in solving:
            codes = quantize_rows(variant, weight_OI)
            wide_OI = weight_OI.float()
            norm = float(wide_OI.square().sum())
            parts.append(_Part(codes, float((wide_OI - dense(codes)).square().sum()), norm))
        return parts

    return read


def _line(variant: VariantPlan, module: str, parts: list[_Part]) -> LedgerLine:
    """Raises SolveError where a weight, or a scale in its stored dtype, is not finite."""
    if not all(bool(torch.isfinite(part.codes.scale_OG.float()).all()) for part in parts):
        what = f"a weight is not finite, or too large for a scale in {parts[0].codes.scale_OG.dtype}"
        raise SolveError(Fault(what, module, "check the source checkpoint, or ignore it in the recipe"))
    error = sum(part.lost for part in parts) / max(sum(part.norm for part in parts), 1e-30)
    return LedgerLine(
        variant=variant.name,
        module=module,
        asked=variant.method,
        used=variant.method,
        tokens=0,
        damping=0.0,
        error=error,
        rtn_error=error,
    )


def _put(draft: Draft, variant: VariantPlan, module: str, parts: list[_Part], pool: ThreadPoolExecutor) -> None:
    """Join the pieces of a linear, pack them, write them."""
    zeros = [part.codes.zero_OG for part in parts if part.codes.zero_OG is not None]
    whole = Codes(
        torch.cat([part.codes.codes_OI for part in parts]),
        torch.cat([part.codes.scale_OG for part in parts]),
        torch.cat(zeros) if zeros else None,
        variant.bits,
    )
    for end, tensor in FORMATS[variant.format].pack(whole).items():
        flat = tensor.reshape(-1).view(torch.uint8)
        starts = range(0, len(flat), _PIECE)
        list(pool.map(lambda start: draft.put(f"{module}.{end}", start, flat[start : start + _PIECE]), starts))  # noqa: B023 - it ends within the loop


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch would use, each computing alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


# The scratch folder: artifacts/.work/{key.json, shard-N.json}


def _commit(work: Path, number: int, done: _Done) -> None:
    """From here on the shard counts as finished."""
    done.write(_done_path(work, number))


def _write_ledger(ledger: Path, work: Path, shards: int) -> None:
    lines = [line for number in range(shards) for line in _Done.read(_done_path(work, number)).lines]
    write_text(ledger, "".join(line.model_dump_json() + "\n" for line in lines))


def _done_path(work: Path, number: int) -> Path:
    return work / f"shard-{number}.json"
