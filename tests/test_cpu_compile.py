"""How the CPU kernels are compiled, by which compiler, and where the library is kept."""
import os
import re
import shutil
import sys
import tempfile

import pytest
import torch
from test_cpu_kernels import KERNELS, call, case

from nanochat.kernels import cpu, ops


def start(folder, name: str) -> int:
    """A process that compiles, if it must, and runs one kernel; what it says is in folder/name. CC names a compiler
    that does not exist: the next is taken. -O0 compiles in a fifth of the time."""
    if child := os.fork():
        return child
    code = 1
    try:
        os.environ |= {"XDG_CACHE_HOME": str(folder), "CC": "no-such-compiler"}
        os.environ.pop("NANOCHAT_CPU_KERNELS", None)
        torch.set_num_threads(1)
        cpu.FLAGS[0] = "-O0"
        with open(folder / name, "w") as sys.stderr:
            library = cpu.library.__wrapped__()
        cpu.library = lambda: library
        code = 0 if library is not None and float(ops.norm(torch.ones(2, 32)).sum()) == 64 else 1
    finally:
        os._exit(code)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """cpu.library as a new process finds it, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NANOCHAT_CPU_KERNELS", raising=False)
    return cpu.library.__wrapped__


@KERNELS
def test_two_processes_compile_once_and_leave_one_file(tmp_path):
    folder = tmp_path / "nanochat" / "kernels"
    folder.mkdir(mode=0o700, parents=True)
    (folder / "tmp12345").write_bytes(b"\x7fELF, half of it")  # what a crash has left
    run = lambda *names: [os.waitpid(child, 0)[1] for child in [start(tmp_path, name) for name in names]]
    assert run("one", "two") == [0, 0]
    for said in ("one", "two"):
        assert re.fullmatch("CPU kernels: CC=no-such-compiler is not a program: compiled by .+\n",
                            (tmp_path / said).read_text())
    name, other = sorted(os.listdir(folder))
    assert re.fullmatch(r"cpu-[0-9a-f]{24}\.so", name) and other == "tmp12345"
    written = os.stat(folder / name).st_mtime_ns
    assert run("three") == [0] and (tmp_path / "three").read_text() == (tmp_path / "two").read_text()
    assert os.stat(folder / name).st_mtime_ns == written


@pytest.mark.parametrize("env, problem", [({"CC": "false", "PATH": "/usr/bin:/bin"}, "false"),
                                          ({"CC": "", "PATH": "/nonexistent"}, "no C compiler"),
                                          ({"NANOCHAT_CPU_KERNELS": "0"}, "")])
def test_without_a_compiler_pytorch_does_the_work(fresh, monkeypatch, capsys, tmp_path, env, problem):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert fresh() is None
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == bool(problem) and not list(tmp_path.rglob("*.so"))


def compiler(path, text, version=1) -> str:
    """An executable that stands in for a compiler; `text` are shell commands that compile to $out."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nfor word; do [ "$last" = -o ] && '
                    f'out=$word; last=$word; done\n{text}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("text, problem", [("echo half > $out; echo no space left >&2; echo and more >&2; exit 1",
                                            "no space left"), ("echo >&2; exit 1", ""),
                                           ("rm -f $out; exit 1", "status 1"), ("echo nonsense > $out", "cpu-")])
def test_a_compiler_that_fails_leaves_one_line_and_no_files(fresh, monkeypatch, capsys, tmp_path, text, problem):
    monkeypatch.setenv("CC", compiler(tmp_path / "compile", text))
    assert fresh() is None
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1 and "and more" not in error
    assert problem == "cpu-" or os.listdir(tmp_path / "nanochat" / "kernels") == []


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> str:
    """The kernels' library, compiled without OpenMP."""
    real = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    return cpu.compiled(real, cpu.FLAGS, str(tmp_path_factory.mktemp("built")))


@KERNELS
def test_a_compiler_without_threads_will_do(fresh, monkeypatch, capsys, tmp_path, built):
    monkeypatch.setenv("CC",
                       compiler(tmp_path / "compile", f'case "$*" in *-fopenmp*) exit 1;; *) cp {built} $out;; esac'))
    single, (inputs, mask) = fresh(), case(3, 2, 3, 2, 40, 20, 32)
    folder, error = tmp_path / "nanochat" / "kernels", capsys.readouterr().err
    assert ("on one thread" in error and error.count("\n") == 1
            and len(os.listdir(folder)) == 1 and folder.stat().st_mode & 0o777 == 0o700)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = call(inputs, mask)
    monkeypatch.setattr(cpu, "library", lambda: single)
    assert torch.equal(call(inputs, mask), expected)


UNUSABLE = {  # what may stand where the cache folder should; it is left alone, and nothing is loaded from there
    "a file": lambda folder, patch: folder.write_text("a file"),
    "somebody else's": lambda folder, patch: (folder.mkdir(mode=0o700), patch.setattr(os, "getuid", lambda: 12345)),
    "open to all": lambda folder, patch: (folder.mkdir(), folder.chmod(0o777)),
    "in one open to all": lambda folder, patch: (folder.mkdir(mode=0o700), folder.parent.chmod(0o777)),
    "a link": lambda folder, patch: folder.symlink_to(tempfile.gettempdir()),
    "relative": lambda folder, patch: patch.setenv("XDG_CACHE_HOME", "relative"),
}


@KERNELS
@pytest.mark.parametrize("kind", UNUSABLE)
def test_without_a_cache_folder_nothing_is_kept(fresh, monkeypatch, capsys, tmp_path, built, kind):
    folder, temporary = tmp_path / "nanochat" / "kernels", tmp_path / "temporary"
    temporary.mkdir(), folder.parent.mkdir(mode=0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("CC", compiler(tmp_path / "compile", f"cp {built} $out"))
    UNUSABLE[kind](folder, monkeypatch)
    assert fresh() is not None and capsys.readouterr().err == ""
    assert list(tmp_path.rglob("*.so")) == os.listdir(temporary) == [] and not os.path.exists("relative")


def test_other_sources_or_flags_have_another_name(monkeypatch, tmp_path):
    folder, command = str(tmp_path), compiler(tmp_path / "one", "echo > $out; ls -i $out > $0.inode")
    names = [cpu.compiled(command, cpu.FLAGS, folder)]
    # renamed: never there by half
    assert int((tmp_path / "one.inode").read_text().split()[0]) == os.stat(names[0]).st_ino
    assert cpu.compiled(command, cpu.FLAGS, folder) == names[0]
    names.append(cpu.compiled(command, [*cpu.FLAGS, "-DOTHER"], folder))
    names.append(cpu.compiled(compiler(tmp_path / "newer", "echo > $out", version=2), cpu.FLAGS, folder))
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "processor", lambda: "another one")
        names.append(cpu.compiled(command, cpu.FLAGS, folder))
    texts = {os.path.basename(path): open(path).read() for path in (*cpu.SOURCES, *cpu.HEADERS)}
    for paths in ("SOURCES", "HEADERS"):
        monkeypatch.setattr(cpu, paths, [str(tmp_path / os.path.basename(path)) for path in getattr(cpu, paths)])
    for changed in (None, *texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(text + "/* more */\n" * (name == changed))
        names.append(cpu.compiled(command, cpu.FLAGS, folder))
    assert names[4] == names[0] and len(set(names)) == 4 + len(texts) and all(map(os.path.exists, names))
