from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_bert.progress.streams import captured_streams

PRELUDE = """
import os, subprocess, sys
from pathlib import Path
from raytrain_bert.progress.streams import captured_streams
def noise(word):
    print(f"python {word}")
    print(f"python error {word}", file=sys.stderr)
    subprocess.run(f"echo native {word}; echo native error {word} >&2", shell=True, check=True)
"""


def run_python(code: str, *, shell_suffix: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        f'exec "$PYTHON" -c "$CODE" {shell_suffix}',
        shell=True,
        capture_output=True,
        env={**os.environ, "PYTHON": sys.executable, "CODE": PRELUDE + code, **environment},
        check=False,
    )


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_python_and_native_noise_goes_to_the_log_and_the_screen_stays_clean(tmp_path):
    log = tmp_path / "folder" / "ray.log"
    done = run_python(
        f"""
noise("before")
with captured_streams(Path({str(log)!r})) as streams:
    noise("inside")
    print("shown", file=streams.stdout)
    print("shown error", file=streams.stderr)
noise("after")
"""
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.decode().split("\n")[:-1]) == [
        "native after",
        "native before",
        "python after",
        "python before",
        "shown",
    ]
    assert sorted(done.stderr.decode().split("\n")[:-1]) == [
        "native error after",
        "native error before",
        "python error after",
        "python error before",
        "shown error",
    ]
    kept = sorted(log.read_text().split("\n")[:-1])
    assert kept == ["native error inside", "native inside", "python error inside", "python inside"]


def test_the_streams_come_back_after_an_exception(tmp_path):
    done = run_python(
        f"""
try:
    with captured_streams(Path({str(tmp_path / "log")!r})):
        raise RuntimeError("inside")
except RuntimeError:
    noise("after")
"""
    )
    assert done.returncode == 0
    assert b"python after\n" in done.stdout
    assert b"native after\n" in done.stdout
    assert b"native error after\n" in done.stderr


def test_the_log_moves_with_its_content_and_is_appended_to(tmp_path):
    first, second = tmp_path / "first.log", tmp_path / "run" / "logs" / "second.log"
    second.parent.mkdir(parents=True)
    second.write_text("of an earlier run\n")
    done = run_python(
        f"""
with captured_streams(Path({str(first)!r})) as streams:
    os.write(1, b"one\\n")
    print("two")
    streams.redirect_to(Path({str(second)!r}))
    os.write(2, b"three\\n")
    streams.redirect_to(Path({str(second)!r}))
    os.write(1, b"four\\n")
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == b""
    assert second.read_text() == "of an earlier run\none\ntwo\nthree\nfour\n"
    assert not first.exists()


def test_a_log_that_cannot_be_written_leaves_the_old_one_in_use(tmp_path):
    log = tmp_path / "log"
    with captured_streams(log) as streams:
        with pytest.raises(OSError, match="directory"):
            streams.redirect_to(tmp_path)
        os.write(1, b"still here\n")
    assert log.read_text() == "still here\n"


def test_captures_nest(tmp_path):
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    with captured_streams(outer):
        os.write(1, b"a\n")
        with captured_streams(inner):
            os.write(1, b"b\n")
            print("c")
        os.write(2, b"d\n")
    assert inner.read_text().split() == ["b", "c"]
    assert outer.read_text().split() == ["a", "d"]


def test_under_pytest_the_yielded_stream_is_the_captured_one(tmp_path, capsys):
    before = sys.stdout, sys.stderr
    with captured_streams(tmp_path / "log") as streams:
        print("noise")
        print("shown", file=streams.stdout)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "shown\n"
    assert (tmp_path / "log").read_text() == "noise\n"


def test_a_stream_without_descriptor_is_replaced_and_put_back(tmp_path, monkeypatch):
    memory = io.StringIO()
    monkeypatch.setattr(sys, "stdout", memory)
    with captured_streams(tmp_path / "log") as streams:
        kept = sys.stdout
        print("noise")
        streams.stdout.write("shown")
    assert sys.stdout is memory
    assert memory.getvalue() == "shown"
    assert (tmp_path / "log").read_text() == "noise\n"
    kept.write("")  # a library that held on to it can go on
    kept.flush()


def test_no_descriptor_is_left_open(tmp_path):
    before = open_descriptors()
    for number in range(3):
        with captured_streams(tmp_path / f"{number}") as streams:
            streams.redirect_to(tmp_path / f"{number}.moved")
    with pytest.raises(RuntimeError), captured_streams(tmp_path / "last"):
        raise RuntimeError
    assert open_descriptors() == before


def test_a_closed_standard_output_is_no_obstacle(tmp_path):
    log = tmp_path / "log"
    done = run_python(
        f"""
with captured_streams(Path({str(log)!r})) as streams:
    print("noise")
    os.write(1, b"native noise\\n")
    streams.stdout.write("dropped")
    streams.stdout.flush()
try:
    os.write(1, b"x")
except OSError:
    os.write(2, b"closed again\\n")
""",
        shell_suffix=">&-",
    )
    assert (done.returncode, done.stderr) == (0, b"closed again\n")
    assert sorted(log.read_text().split("\n")[:-1]) == ["native noise", "noise"]


def test_libraries_may_print_what_the_locale_cannot_write(tmp_path):
    log = tmp_path / "log"
    done = run_python(
        f"""
with captured_streams(Path({str(log)!r})) as streams:
    print("library \\N{{SNOWMAN}}")
    streams.stdout.write("screen \\N{{SNOWMAN}}\\n")
print(sys.stdout.errors)
""",
        PYTHONIOENCODING="ascii",
    )
    assert (done.returncode, done.stdout) == (0, b"screen ?\nstrict\n"), done.stderr
    assert log.read_text() == "library \\u2603\n"


def test_a_terminal_stays_a_terminal(tmp_path):
    code = (
        PRELUDE
        + f"""
with captured_streams(Path({str(tmp_path / "log")!r})) as streams:
    streams.stdout.write(f"{{streams.stdout.isatty()}} {{sys.stdout.isatty()}}")
"""
    )
    ours, theirs = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE, check=True)
        assert os.read(ours, 100) == b"True False"
    finally:
        os.close(ours)
        os.close(theirs)


def test_without_a_log_nothing_is_captured(tmp_path, capfd):
    with captured_streams(None) as streams:
        os.write(1, b"native\n")
        print("shown", file=streams.stdout, flush=True)
        streams.redirect_to(tmp_path / "log")
    assert capfd.readouterr().out == "native\nshown\n"
    assert not Path(tmp_path / "log").exists()
