"""What Triton makes of a kernel for a GPU that is not here: registers, spills, shared memory, wide loads, tensor cores."""
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}


class Compiled(NamedTuple):
    """What a compiled kernel takes. Counts of instructions are in its text; -1 is not known for this target."""
    registers: int      # a thread
    spills: int         # bytes to local memory and back
    shared: int         # bytes a block
    loads: int          # global loads
    wide_loads: int     # of these, of 128 bits
    tensor_cores: str   # "wgmma", "mma", "mfma" or ""


def compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], target: str = "sm_90",
    num_warps: int = 4, num_stages: int = 3, divisible: Sequence[str] = (),
) -> Compiled:
    """Compile a kernel for a target, with all pointers aligned to 16 bytes.

    Args:
        kernel: a `triton.jit` function, autotuned or not.
        signature: the types of its arguments, by name, as "*fp32", "i32", "fp32".
        constants: its constexpr arguments, by name.
        target: a name in TARGETS.
        num_warps, num_stages: as a launch takes them.
        divisible: integer arguments that are multiples of 16, as a launch finds out by itself.

    Raises:
        whatever Triton raises for a kernel that does not compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    while hasattr(kernel, "fn") and hasattr(kernel.fn, "arg_names"):
        kernel = kernel.fn
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    aligned: Any = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in enumerate(types.items())
                    if kind.startswith("*") or name in divisible}
    backend, arch, warp = TARGETS[target]
    made = triton.compile(
        ASTSource(kernel, types, constants, aligned), target=GPUTarget(backend, arch, warp),
        options=dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True))
    return (_nvidia if backend == "cuda" else _amd)(made)


def _nvidia(made: Any) -> Compiled:
    ptx = made.asm["ptx"]
    sass = _tool("cuobjdump", "-sass", written=made.asm["cubin"])
    log = _ptxas(ptx)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if not (spills and registers):
        raise RuntimeError(f"ptxas said nothing of registers and spills: {log[-500:]}")
    count = lambda pattern: len(re.findall(pattern, sass))
    return Compiled(
        int(registers[1]), int(spills[1]) + int(spills[2]), made.metadata.shared,
        count(r"\bLDG"), count(r"LDG(?:STS)?\.E[^;]*\.128"),          # STS: copied to shared memory
        "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "")


def _amd(made: Any) -> Compiled:
    text = made.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    return Compiled(
        number("vgpr_count"), number("vgpr_spill_count") + number("sgpr_spill_count"), number("group_segment_fixed_size"),
        len(re.findall(r"\b(?:global|buffer)_load", text)), len(re.findall(r"\b(?:global|buffer)_load_dwordx4", text)),
        "mfma" if "v_mfma" in text else "")


def _ptxas(ptx: str) -> str:
    """The log of the first assembler that knows the target: Triton has one for Blackwell beside the other."""
    arch = re.search(r"\.target (\w+)", ptx)
    logs = [_tool(name, "-v", f"--gpu-name={arch[1] if arch else ''}", "-o", "/dev/null", written=ptx.encode())
            for name in ("ptxas", "ptxas-blackwell") if (_bin() / name).exists()]
    return next((log for log in logs if "Used " in log), logs[-1])


def _bin() -> Path:
    import triton
    return Path(triton.__file__).parent / "backends/nvidia/bin"


def _tool(name: str, *options: str, written: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(written)
        file.flush()
        done = subprocess.run([str(_bin() / name), *options, file.name], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
