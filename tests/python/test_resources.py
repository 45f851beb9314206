"""The report of what kernels take: reading cuobjdump, the judgement, the receipt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flashnext import receipts, resources
from flashnext.cli import main
from flashnext.cli.receipts import headline
from flashnext.errors import InputError
from helpers import ROOT

# In a file's unnamed namespace nvcc puts the file into the name.
SPACE = "_ZN9flashnext4cuda"
DENSE = f"{SPACE}40_GLOBAL__N__09ea8b45_8_dense_cu_7fbbb98b13decode_kernelENS0_11ProductArgsE"
GEMM = f"{SPACE}45_GLOBAL__N__4f748f8b_12_exl3_gemm_cu_25f1a86511gemm_kernelILi0ELi2EEEvNS0_4JobsE"
ROUTE = f"{SPACE}45_GLOBAL__N__72f99720_12_moe_route_cu_9c0b995d"
SUM = f"{ROUTE}14combine_kernelILb1EEEvNS_11CombineArgsE"


def usage(arch: str, *kernels: tuple[str, int, int, int, int]) -> str:
    """As cuobjdump prints it."""
    head = ["", "Fatbin elf code:", "================", f"arch = {arch}", "code version = [1,8]"]
    head += [
        "host = linux",
        "compile_size = 64bit",
        "",
        "Resource usage:",
        " Common:",
        "  GLOBAL:0",
    ]
    for name, registers, stack, shared, local in kernels:
        head.append(f" Function {name}:")
        head.append(
            f"  REG:{registers} STACK:{stack} SHARED:{shared} LOCAL:{local} CONSTANT[0]:688 "
            "TEXTURE:0 SURFACE:0 SAMPLER:0"
        )
    return "\n".join(head) + "\n"


SAMPLE = (
    usage("sm_90", (DENSE, 64, 16, 9216, 0), (SUM, 32, 0, 1024, 0))
    + usage("sm_120", (DENSE, 64, 8, 9216, 0), (SUM, 40, 0, 1024, 0))
    + usage("sm_90", (GEMM, 168, 0, 1536, 0))
    + usage("sm_120", (GEMM, 128, 92, 1536, 4))
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of names, cut to the kernels of the sample."""
    monkeypatch.setattr(resources, "USES", {"exl3_gemm": resources.PREFILL})
    monkeypatch.setattr(resources, "STACK", {"dense.decode_kernel": (16, "reason")})


def toolkit(folder: Path, text: str, code: int = 0) -> Path:
    """A toolkit whose cuobjdump says ``text``."""
    tool = folder / "bin" / "cuobjdump"
    tool.parent.mkdir(parents=True)
    (folder / "usage.txt").write_text(text)
    tool.write_text(
        "#!/bin/sh\ncase $1 in\n"
        '--version) echo "Cuda compilation tools, release 13.0, V13.0.1" ;;\n'
        '--extract-elf) echo "Cuda compilation tools, release 13.0, V13.0.88" > a.sm_90.cubin ;;\n'
        f"*) cat '{folder}/usage.txt'; exit {code} ;;\nesac\n"
    )
    tool.chmod(0o755)
    return folder


def test_names_are_file_kernel_and_arguments() -> None:
    assert resources.short_name(DENSE) == "dense.decode_kernel"
    assert resources.short_name(GEMM) == "exl3_gemm.gemm_kernel<0, 2>"
    assert resources.short_name(SUM) == "moe_route.combine_kernel<true>"
    assert resources.short_name("_Z5plainPf") == "_Z5plainPf"
    typed = GEMM.replace("ILi0ELi2EE", "IfE")
    assert resources.short_name(typed) == typed, "what is not understood is not shortened"


def test_every_number_arrives_at_its_kernel() -> None:
    found = resources.parse(SAMPLE)
    assert set(found) == {"sm_90", "sm_120"}
    names = ["dense.decode_kernel", "exl3_gemm.gemm_kernel<0, 2>", "moe_route.combine_kernel<true>"]
    assert [k.name for k in found["sm_120"]] == names
    dense, gemm, _ = found["sm_120"]
    assert (dense.registers, dense.stack_bytes, dense.shared_bytes) == (64, 8, 9216)
    assert (gemm.registers, gemm.stack_bytes, gemm.use) == (128, 96, resources.PREFILL)
    assert resources.use_of("moe_route.combine_kernel<true>") == resources.DECODE
    assert resources.use_of("moe_route.combine_kernel<false>") == resources.PREFILL
    assert resources.use_of("moe_route.route_kernel<16>") == resources.DECODE
    assert resources.use_of("exl3_plan.plan_kernel") == resources.PREFILL
    assert resources.use_of("exl3_plan.plan_units_kernel") == resources.DECODE
    assert resources.use_of("moe_route.route_kernel<128>") == resources.OTHER


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SAMPLE.replace("  REG:32", "  R:32"), "said nothing about"),
        (SAMPLE.rpartition("  REG:")[0], "said nothing about"),
        (SAMPLE + usage("sm_90", (GEMM, 1, 0, 0, 0)), "two kernels of sm_90 are named"),
    ],
)
def test_output_that_is_not_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resources.parse(text)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("text", "field", "entry"),
    [
        (SAMPLE, None, None),
        (usage("sm_90", (DENSE, 64, 0, 0, 0), (GEMM, 9, 0, 0, 0)), "not_compiled_for", "sm_120"),
        (
            SAMPLE.replace("REG:64 STACK:8", "REG:64 STACK:24"),
            "decode_stack_unexpected",
            {"arch": "sm_120", "kernel": "dense.decode_kernel", "bytes": 24},
        ),
        (
            SAMPLE.replace("REG:40 STACK:0", "REG:40 STACK:4"),
            "decode_stack_unexpected",
            {"arch": "sm_120", "kernel": "moe_route.combine_kernel<true>", "bytes": 4},
        ),
        (
            SAMPLE + usage("sm_90", (GEMM.replace("Li2", "Li1"), 9, 0, 0, 0)),
            "not_in_all",
            "exl3_gemm.gemm_kernel<0, 1>",
        ),
        (SAMPLE.replace("exl3_gemm_cu", "exl3_germ_cu"), "names_without_kernel", "exl3_gemm"),
    ],
)
def test_the_judgement(text: str, field: str | None, entry: Any) -> None:
    check = resources.judge(resources.parse(text))
    assert check["pass"] == (field is None)
    if field is not None:
        assert entry in check[field]


@pytest.mark.usefixtures("small")
def test_the_receipt_is_valid_and_says_what_was_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", SAMPLE)))
    monkeypatch.setenv("FLASHNEXT_GATES", str(tmp_path / "none"))
    library = tmp_path / "libflashnext_cuda.a"
    library.write_bytes(b"kernels")
    folder = tmp_path / "receipts"
    assert main(["resources", "--library", str(library), "--receipt", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "exl3_gemm.gemm_kernel<0, 2>" in printed
    assert "96 bytes of stack" in printed
    (path,) = receipts.find(folder)
    assert "-resources-sm120-" in path.name
    receipt = receipts.read(path)
    assert receipts.problems(receipt, path.name) == []
    assert receipt["code"]["nvcc"] == "nvcc 13.0.88"
    assert receipt["results"]["sm_120"]["skipped"] == (
        "not run: no sm_120 card was there; compiled and inspected only"
    )
    assert receipt["results"]["sm_120"]["with_stack"] == [
        "dense.decode_kernel",
        "exl3_gemm.gemm_kernel<0, 2>",
    ]
    assert receipt["summary"]["sm_90_registers"]["most"] == 168
    assert receipt["check"]["decode_kernels"] == [
        "dense.decode_kernel",
        "moe_route.combine_kernel<true>",
    ]
    assert headline(receipt) == "compiled, sm_90 not run, sm_120 not run"
    assert str(tmp_path) not in path.read_text(), "folders of one machine stay out of it"


@pytest.mark.usefixtures("small")
def test_a_gate_receipt_of_this_build_covers_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = {"name": "NVIDIA H200", "capability": "sm_90"}
    gate = {
        "id": "a gate",
        "check": {"pass": True},
        "skipped": None,
        "machine": {"gpu": gpu},
        "code": {"build_id": resources._core.build_info()["build_id"]},
    }
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", SAMPLE)))
    monkeypatch.setattr(resources.evidence, "gate_receipts", lambda where: [gate])
    results = resources.report()["results"]
    assert (results["sm_90"]["gate"], results["sm_90"]["skipped"]) == ("a gate", None)
    assert results["sm_120"]["gate"] is None
    assert headline(resources.report()) == "compiled, sm_120 not run"
    gate["code"] = {"build_id": "another"}
    assert "no gate receipt of sm_90" in resources.report()["results"]["sm_90"]["skipped"]


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    which = resources.shutil.which
    monkeypatch.setattr(
        resources.shutil, "which", lambda name: None if name.startswith("/usr") else which(name)
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert main(["resources"]) == 2
    assert "cuobjdump was not found" in capsys.readouterr().err
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "empty", "")))
    assert main(["resources"]) == 2
    assert "no CUDA kernels in it" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "bad", "no such file", code=1)))
    assert main(["resources"]) == 2
    assert "cuobjdump failed: no such file" in capsys.readouterr().err


def test_the_tables_name_kernels_of_the_sources() -> None:
    for name in {*resources.USES, *resources.STACK}:
        file, _, kernel = name.partition("<")[0].partition(".")
        source = ROOT / "cuda" / f"{file}.cu"
        assert source.is_file(), name
        assert f"{kernel}(" in source.read_text(), name
