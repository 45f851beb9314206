"""The command line in a process of its own: output, exit codes, JSON, chat."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flashnext
from helpers import run_cli

SUM = "Add 17 and 14."


def test_generate_with_the_demo_model() -> None:
    result = run_cli("generate", "Tell me a story about a fox and a lamp.")
    assert result.returncode == 0, result.stderr
    assert "fox" in result.stdout and result.stdout.endswith("\n")
    assert len(result.stdout) > 200
    assert "Traceback" not in result.stderr


def test_generate_reads_stdin() -> None:
    for arguments in (["-"], []):
        result = run_cli("generate", *arguments, stdin=f"{SUM}\n")
        assert result.returncode == 0 and result.stdout == "17 + 14 = 31.\n"


def test_generate_json(session: flashnext.Session) -> None:
    result = run_cli("generate", SUM, "--json", "--device", "host")
    assert result.returncode == 0
    answer = json.loads(result.stdout)
    expected = session.generate(SUM)
    assert answer["text"] == expected.text and answer["tokens"] == expected.tokens
    assert answer["finish_reason"] == "stop" and answer["device"] == "host"
    assert answer["prompt_tokens"] == expected.prompt_tokens and answer["reused_tokens"] == 0
    assert answer["model"].endswith("tiny-3.05bpw-h5-ng5")
    assert set(answer["timings"]) == {
        "time_to_first_token",
        "queued_seconds",
        "prefill_seconds",
        "decode_seconds",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "longest_wait",
    }


def test_generate_options(session: flashnext.Session) -> None:
    result = run_cli("generate", SUM, "--max-new-tokens", "3", "--stats")
    assert result.stdout == session.generate(SUM, max_new_tokens=3).text + "\n"
    assert "3 new (length)" in result.stderr
    result = run_cli("generate", SUM, "--stop", "=")
    assert result.stdout == "17 + 14 \n"
    options = ["--temperature", "1.2", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01"]
    result = run_cli("generate", SUM, *options, "--seed", "3", "--threads", "1")
    sampling = {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3}
    assert result.stdout.rstrip("\n") == session.generate(SUM, **sampling).text.rstrip("\n")
    raw = "In a pond far away lived a"
    result = run_cli("generate", raw, "--raw", "--max-new-tokens", "5")
    assert result.stdout == session.generate(raw, chat=False, max_new_tokens=5).text + "\n"


def test_no_terminal_no_bars() -> None:
    result = run_cli("generate", SUM, "--quiet")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "COMMAND"),
        (["dance"], 2, "dance"),
        (["generate", "x", "--nonsense"], 2, "--nonsense"),
        (["generate", "x", "--top-p", "2"], 2, "top_p"),
        (["generate", "x", "--max-new-tokens", "0"], 2, "max_new_tokens"),
        (["generate", "x", "--max-new-tokens", "9999"], 2, "window"),
        (["generate", "x", "--window", "9999"], 2, "9999"),
        (["generate", "x", "--device", "tpu"], 2, "tpu"),
        (["generate", "x", "--raw", "--system", "y"], 2, "--system"),
        (["generate", ""], 2, "empty"),
        (["generate", "x", "--model", "/nonexistent"], 3, "/nonexistent"),
        (["chat", "--model", "/nonexistent"], 3, "/nonexistent"),
        (["inspect", "/nonexistent"], 3, "/nonexistent"),
        (["inspect", "--window", "9999"], 2, "9999"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, word: str) -> None:
    result = run_cli(*arguments)
    assert result.returncode == code, result.stderr
    assert word in result.stderr and "Traceback" not in result.stderr


def test_errors_as_json() -> None:
    result = run_cli("generate", "x", "--json", "--model", "/nonexistent")
    assert result.returncode == 3
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "checkpoint" and "/nonexistent" in error["message"]


def test_out_of_memory_has_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashnext import cli

    def fail(options: object) -> None:
        raise MemoryError("host: 5 bytes")

    monkeypatch.setattr("flashnext.cli.demo.run", fail)
    assert cli.main(["demo-path"]) == 4


def test_help_and_version() -> None:
    result = run_cli("--help")
    assert result.returncode == 0
    for word in ("generate", "chat", "inspect", "demo-path", "exit codes"):
        assert word in result.stdout
    for command in ("generate", "chat", "inspect", "demo-path"):
        assert run_cli(command, "--help").returncode == 0
    assert flashnext.__version__ in run_cli("--version").stdout


def test_demo_path(demo: Path) -> None:
    assert run_cli("demo-path").stdout.strip() == str(demo)
    assert json.loads(run_cli("demo-path", "--json").stdout) == {"path": str(demo)}


def test_inspect(demo: Path) -> None:
    result = run_cli("inspect")
    assert result.returncode == 0
    for word in ("routed experts", "n-gram table", "no problems", "parameters"):
        assert word in result.stdout
    report = json.loads(run_cli("inspect", str(demo), "--json", "--lanes", "2").stdout)
    assert report["problems"] == [] and report["shape"]["experts"] == 32
    sizes = {file["name"]: file["bytes"] for file in report["files"]}
    assert sizes == {f.name: f.stat().st_size for f in demo.glob("*.safetensors")}
    assert report["plan"]["lanes"] == 2 and report["plan"]["fits"]
    experts = next(f for f in report["families"] if f["family"] == "experts")
    assert experts["bits"] == {"3.0": 8 * 32 * 3}


def test_chat_keeps_the_conversation(session: flashnext.Session) -> None:
    lines = [
        "What is the opposite of up?",
        SUM,
        "/stats",
        "/dance",
        "/help",
        "/reset",
        SUM,
        "/quit",
    ]
    result = run_cli("chat", stdin="\n".join(lines) + "\n")
    assert result.returncode == 0, result.stderr
    messages: list[dict[str, str]] = []
    expected = []
    for line in lines[:2]:
        messages.append({"role": "user", "content": line})
        expected.append(session.generate(messages).text)
        messages.append({"role": "assistant", "content": expected[-1]})
    out = result.stdout
    assert out.startswith("\n".join(expected) + "\n")
    assert "decode" in out and "no command '/dance'" in out and "/reset" in out
    assert out.endswith(f"{session.generate(SUM).text}\n")


def test_chat_ends_with_its_input() -> None:
    result = run_cli("chat", stdin=SUM)
    assert result.returncode == 0 and result.stdout == "17 + 14 = 31.\n"


def test_chat_says_when_the_window_is_full() -> None:
    long = " ".join(["lamp"] * 200)
    result = run_cli("chat", "--window", "100", stdin=f"{long}\n{SUM}\n")
    assert result.returncode == 0
    assert "window of 100" in result.stderr and "/reset" in result.stderr
    assert result.stdout == "17 + 14 = 31.\n"


def test_ctrl_c_in_chat_stops_the_answer_alone() -> None:
    command = [sys.executable, "-m", "flashnext", "chat", "--quiet", "--temperature", "3"]
    command += ["--max-new-tokens", "3500", "--seed", "2"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"Tell me a story.\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(b"/stats\n/quit\n", timeout=60)
    assert process.returncode == 0, err.decode()
    assert b"(stopped)\n" in out and b"(cancelled)" in out
    assert b"Traceback" not in err


def test_ctrl_c_ends_generate_with_130() -> None:
    command = [sys.executable, "-m", "flashnext", "generate", "Tell me a story.", "--quiet"]
    command += ["--max-new-tokens", "4000", "--temperature", "3", "--seed", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err.decode()
    assert time.monotonic() - started < 10
    assert b"Traceback" not in err


def test_a_reader_that_leaves_is_no_crash() -> None:
    command = f"{sys.executable} -m flashnext generate 'Tell me a story.' --quiet | head -c 5"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert len(result.stdout) == 5 and "Traceback" not in result.stderr
