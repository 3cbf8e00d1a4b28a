from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kapsi import files
from kapsi.errors import FileError
from kapsi.files import append_line, atomic, check_place, locked, write_json
from kapsi.training import run_folder
from kapsi.training.run_folder import NewRun, free_path, open_run, recover

SOURCE = Path(run_folder.__file__)


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note what is flushed to the disk instead of waiting for the disk."""
    flushed: list[str] = []

    def fsync(handle: int) -> None:
        link = Path(f"/proc/self/fd/{handle}")
        flushed.append(Path(os.readlink(link)).name if link.is_symlink() else "?")

    monkeypatch.setattr(os, "fsync", fsync)
    return flushed


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """Expect a FileError of one line that has every part."""
    with pytest.raises(FileError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def make(path: str | Path, which: str = "old", overwrite: bool = False, **files: str) -> None:
    with NewRun(path, overwrite=overwrite) as run:
        for name, text in {"model": f"model of {which}", f"only_{which}": which, **files}.items():
            (run.folder / name).write_text(text)
        run.manifest = {"which": which}


def check(path: Path, which: str) -> None:
    manifest = open_run(path)
    assert manifest["which"] == which
    assert list(manifest["files"]) == ["model", f"only_{which}"]
    assert (path / "model").read_text() == f"model of {which}"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def never() -> None:
    pytest.fail("the block must not be entered")


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# --- writing


def test_new_run_is_written_beside_and_lists_its_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "run"
    with NewRun(path) as run:
        (run.folder / "b.txt").write_text("bé")
        (run.folder / "a.txt").write_bytes(b"")
        run.manifest = {"zeta": 1, "alpha": "é", "format": "mine", "files": "mine"}
        assert not path.exists()
        assert run.folder.parent == path.parent
        assert run.folder.name.startswith(f".run.new-{os.getpid()}")
    assert names(path.parent) == ["run"]
    text = (path / "run.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert '\n  "alpha": "é"' in text
    manifest = json.loads(text)
    assert list(manifest) == ["format", "format_version", "zeta", "alpha", "files"]
    assert (manifest["format"], manifest["format_version"]) == ("kapsi run", 2)
    assert manifest["files"] == {
        "a.txt": {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
        "b.txt": {"bytes": 3, "sha256": hashlib.sha256("bé".encode()).hexdigest()},
    }
    assert open_run(path) == manifest


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_everything_reaches_the_disk_before_the_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: list[str]
) -> None:
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        disk.append(f"rename to {Path(target).name}")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    make(tmp_path / "run")
    first = disk.index("rename to run")
    folder = next(name for name in disk if name.startswith(".run.new-"))
    assert {"model", "only_old", "run.json", folder} == set(disk[:first])
    assert disk[first:] == ["rename to run", tmp_path.name]
    (tmp_path / "run" / "notes").mkdir()
    (tmp_path / "run" / "notes" / "note").write_text("mine")
    disk.clear()
    make(tmp_path / "run", "new", overwrite=True)
    first = disk.index("rename to .run.old")
    assert {"model", "only_new", "run.json", folder, "notes", "note"} == set(disk[:first])
    assert disk[first : first + 3] == ["rename to .run.old", "rename to run", tmp_path.name]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", [True, False])
def test_an_error_in_the_block_leaves_the_path_as_it_was(tmp_path: Path, error: Any, before: bool) -> None:
    path = tmp_path / "run"
    if before:
        make(path)

    def write() -> None:
        with NewRun(path, overwrite=True) as run:
            (run.folder / "model").write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == (["run"] if before else [])
    if before:
        check(path, "old")
    make(path, "new", overwrite=True)  # the same process may try again
    check(path, "new")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing", [1, 2])
def test_an_error_in_the_swap_puts_the_old_run_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, failing: int
) -> None:
    make(tmp_path / "run")
    real, calls = os.rename, 0

    def rename(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise error
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        if isinstance(error, OSError):
            with refused("cannot write the run: No space left; check"):
                make(tmp_path / "run", "new", overwrite=True)
        else:
            with pytest.raises(KeyboardInterrupt):
                make(tmp_path / "run", "new", overwrite=True)
    assert names(tmp_path) == ["run"]
    check(tmp_path / "run", "old")


def test_a_run_is_replaced_with_overwrite_only(tmp_path: Path) -> None:
    path = tmp_path / "run"
    make(path)
    with refused(repr(str(path)), "already there; give --overwrite to replace it, or another --output"):
        make(path, "new")
    check(path, "old")
    make(path, "new", overwrite=True)
    check(path, "new")
    assert names(path) == ["model", "only_new", "run.json"]
    assert names(tmp_path) == ["run"]


def test_files_of_the_user_move_to_the_new_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    make(path)
    (path / "notes" / "deep").mkdir(parents=True)
    (path / "notes" / "deep" / "a.txt").write_text("mine")
    (path / "notes" / "link").symlink_to("deep")
    (path / "read_only").write_text("kept")
    (path / "read_only").chmod(0o400)
    (path / "link").symlink_to("nowhere")
    (path / "folder_link").symlink_to("notes")
    (path / "only_new").mkdir()  # the new run has a file of that name
    make(path, "new", overwrite=True)
    check(path, "new")
    assert (path / "notes" / "deep" / "a.txt").read_text() == "mine"
    assert (path / "read_only").stat().st_mode & 0o777 == 0o400
    assert os.readlink(path / "link") == "nowhere"
    assert os.readlink(path / "notes" / "link") == "deep"
    assert os.readlink(path / "folder_link") == "notes"
    assert (path / "only_new").is_file()
    assert names(path) == ["folder_link", "link", "model", "notes", "only_new", "read_only", "run.json"]


def test_an_error_while_copying_files_of_the_user_stops_the_replacement(tmp_path: Path) -> None:
    path = tmp_path / "run"
    make(path)
    os.mkfifo(path / "pipe")
    with refused("cannot write the run", "pipe"):
        make(path, "new", overwrite=True)
    check(path, "old")
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{", '{"format": "other"}', '"kapsi run"', '{"a": "kapsi run"', "[" * 100_000]
)
def test_other_folders_are_never_replaced(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "data"
    path.mkdir()
    (path / "mine.csv").write_text("1")
    if text is not None:
        (path / "run.json").write_text(text)
    with refused("a folder without a kapsi run, never replaced, even with --overwrite; give another --output"):
        make(path, overwrite=True)
    assert (path / "mine.csv").read_text() == "1"
    assert names(tmp_path) == ["data"]


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("1")
    with refused("not a folder, never replaced"):
        make(path, overwrite=True)
    assert path.read_text() == "1"
    path.unlink()
    path.symlink_to(path)  # a link to itself
    with refused("not a folder"):
        make(path, overwrite=True)


def test_an_empty_folder_is_used_with_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    make(path)
    check(path, "old")
    assert path.stat().st_mode & 0o777 == 0o700
    make(path, "new", overwrite=True)
    assert path.stat().st_mode & 0o777 == 0o700
    make(tmp_path / "other")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.parametrize(
    "text", ['{"format": "kapsi run"}', '{\n  "format": "kapsi run",\n  "form', '{"format":"kapsi run",é']
)
def test_a_damaged_run_may_be_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run"
    make(path)
    (path / "run.json").write_bytes(text.encode()[:-1] if text.endswith("é") else text.encode())
    with refused("--overwrite"):
        make(path, "new")
    make(path, "new", overwrite=True)
    check(path, "new")
    assert (path / "only_old").read_text() == "old"  # whose it was is not known any more: kept


def test_a_write_protected_run_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "run")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "run")
    with refused("write-protected; make it writable"):
        make(tmp_path / "run", "new", overwrite=True)
    check(tmp_path / "run", "old")


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "latest"
    link.symlink_to("../run")
    make(link)  # the target is not there yet
    make(link, "new", overwrite=True)
    assert os.readlink(link) == "../run"
    check(tmp_path / "run", "new")
    check(link, "new")
    assert names(tmp_path) == ["links", "run"]
    assert names(tmp_path / "links") == ["latest"]


def test_current_folder_and_those_above_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a" / "b"
    path.mkdir(parents=True)
    monkeypatch.chdir(path)
    for given in (".", "", "..", "../..", "/", path, tmp_path / "a", "../b/"):
        with refused("the current folder or one above it; give another --output"):
            make(given, overwrite=True)
    make("./x/../c/")
    make("../d/")
    assert names(path) == ["c"]
    assert names(tmp_path / "a") == ["b", "d"]


def test_paths_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with refused(repr(str(tmp_path / "file" / "x" / "run")), f"{str(tmp_path / 'file')!r} is not a folder"):
        make(tmp_path / "file" / "x" / "run")
    with refused("cannot begin the run: File name too long; check"):
        make(tmp_path / ("n" * 256))
    make(tmp_path / ("n" * 255))  # the hidden names beside it are shorter
    assert names(tmp_path) == ["file", "n" * 255]
    shutil.rmtree(tmp_path / ("n" * 255))
    with refused("\\n", "\\x00", "not a usable path"):
        make(f"{tmp_path}/a\nb\0c")
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied")))
        with refused("cannot begin the run: Permission denied; check the path, its permissions"):
            make(tmp_path / "run")
    make(tmp_path / "run")  # the failed attempts are forgotten
    assert names(tmp_path) == ["file", "run"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_path_taken_meanwhile(tmp_path: Path, overwrite: bool) -> None:
    path = tmp_path / "run"
    make(tmp_path / "elsewhere")
    run = NewRun(path, overwrite=overwrite)
    run.__enter__()
    run.manifest = {"which": "new"}
    shutil.copytree(tmp_path / "elsewhere", path)
    if overwrite:
        run.__exit__(None, None, None)
        assert open_run(path)["which"] == "new"
    else:
        with refused("already there"):
            run.__exit__(None, None, None)
        check(path, "old")
    assert names(tmp_path) == ["elsewhere", "run"]


def test_a_foreign_thing_made_at_the_path_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with refused("not a folder"), NewRun(path, overwrite=True):
        path.write_text("mine")
    assert path.read_text() == "mine"
    assert names(tmp_path) == ["run"]


def test_a_process_does_not_write_the_same_path_twice_at_once(tmp_path: Path) -> None:
    with NewRun(tmp_path / "run") as run:
        (run.folder / "model").write_text("first")
        with refused("is being written by this process"):
            make(tmp_path / "run")
        assert free_path(tmp_path / "run") == tmp_path / "run-2"
    assert (tmp_path / "run" / "model").read_text() == "first"


def test_wrong_files_in_a_run(tmp_path: Path) -> None:
    with refused("'sub' cannot be in a run"), NewRun(tmp_path / "run") as run:
        (run.folder / "sub").mkdir()
    with refused("'link' cannot be in a run"), NewRun(tmp_path / "run") as run:
        (run.folder / "link").symlink_to("/etc/hostname")
    with refused("'a:b' cannot be in a run"), NewRun(tmp_path / "run") as run:
        (run.folder / "a:b").write_text("")
    for value in (float("nan"), {1, 2}, "\ud800"):
        with refused("run.json", "not JSON"), NewRun(tmp_path / "run") as run:
            run.manifest = {"loss": value}
    assert names(tmp_path) == []


# --- recovering


def test_recover_without_anything_to_do(tmp_path: Path) -> None:
    assert recover(tmp_path / "none" / "run") is None
    (tmp_path / "file").write_text("")
    assert recover(tmp_path / "file" / "run") is None
    assert recover("/") is None
    make(tmp_path / "run")
    assert recover(tmp_path / "run") is None
    check(tmp_path / "run", "old")


@pytest.mark.parametrize("empty", [False, True])
def test_recover_puts_the_old_run_back(tmp_path: Path, empty: bool) -> None:
    path = tmp_path / "run"
    make(path)
    path.rename(tmp_path / ".run.old")
    if empty:
        path.mkdir()
    note = recover(str(path))
    assert note == f"{str(path)!r}: replacing this run was interrupted; the previous run is restored"
    assert names(tmp_path) == ["run"]
    check(path, "old")
    assert recover(path) is None


def test_every_entry_recovers_first(tmp_path: Path) -> None:
    path = tmp_path / "run"
    make(path)
    path.rename(tmp_path / ".run.old")
    check(path, "old")
    path.rename(tmp_path / ".run.old")
    assert free_path(path) == tmp_path / "run-2"
    path.rename(tmp_path / ".run.old")
    with refused("already there"), NewRun(path):
        never()
    path.rename(tmp_path / ".run.old")
    make(path, "new", overwrite=True)
    check(path, "new")
    assert names(tmp_path) == ["run"]


def test_another_replacement_that_was_killed_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "run"
    make(path)
    (path / "note").write_text("mine")
    with NewRun(path, overwrite=True):
        path.rename(tmp_path / ".run.old")
    assert names(path) == ["note", "run.json"]
    assert names(tmp_path) == ["run"]


def test_everything_waits_while_another_process_swaps(tmp_path: Path) -> None:
    for name in ("run", "read", "replaced"):
        make(tmp_path / name)
    done: dict[str, Any] = {}

    def begin() -> None:
        with NewRun(tmp_path / "replaced", overwrite=True):
            done["begin"] = True

    waiting = [
        threading.Thread(target=lambda: done.update(recover=recover(tmp_path / "run"))),
        threading.Thread(target=lambda: done.update(open=open_run(tmp_path / "read")["which"])),
        threading.Thread(target=begin),
    ]
    with ExitStack() as stack:
        for name in ("run", "read", "replaced"):
            stack.enter_context(run_folder._lock(tmp_path / name))
        (tmp_path / "run").rename(tmp_path / ".run.old")
        for thread in waiting:
            thread.start()
        waiting[0].join(timeout=0.2)
        assert done == {}
        (tmp_path / ".run.old").rename(tmp_path / "run")
    for thread in waiting:
        thread.join()
    assert done == {"recover": None, "open": "old", "begin": True}


def test_recover_removes_the_old_run_when_the_new_one_is_there(tmp_path: Path) -> None:
    make(tmp_path / "first")
    make(tmp_path / "run", "new")
    (tmp_path / "first").rename(tmp_path / ".run.old")
    assert recover(tmp_path / "run") is None
    assert names(tmp_path) == ["run"]
    check(tmp_path / "run", "new")


def test_recover_leaves_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (tmp_path / ".run.old").mkdir()
    (tmp_path / ".run.old" / "mine").write_text("1")
    assert recover(path) is None
    make(path)
    with refused(".run.old", "in the way of replacing the run; move or delete it"):
        make(path, "new", overwrite=True)
    check(path, "old")
    assert names(tmp_path) == [".run.old", "run"]
    # a run under `.run.old`, and something else than a run at the path: neither is deleted
    shutil.rmtree(tmp_path / ".run.old")
    path.rename(tmp_path / ".run.old")
    path.mkdir()
    (path / "mine").write_text("1")
    assert recover(path) is None
    assert names(path) == ["mine"]
    check(tmp_path / ".run.old", "old")


def test_recover_tells_when_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / ".run.old")
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system")))
    with refused("cannot restore the run after an interrupted replacement: Read-only file system"):
        open_run(tmp_path / "run")
    assert names(tmp_path) == [".run.old"]


def test_recover_removes_only_folders_of_dead_processes(tmp_path: Path) -> None:
    dead, host = dead_pid(), files._HOST
    gone = [f".run.new-{dead}", f".run.new-{dead}-{host}", f".run.gone-{dead}-{host}", f".run.new-{os.getpid()}-{host}"]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        stay = [
            f".run.new-{other.pid}-{host}",
            f".run.new-{other.pid}",
            ".run.new-1",
            f".run.new-{dead}-{host}-on-another-machine",
            f".other.new-{dead}",
            f".run.new-{dead}x",
            f"run.new-{dead}",
            f".run.new-{'9' * 30}",
        ]
        for name in gone + stay:
            (tmp_path / name).mkdir()
            (tmp_path / name / "model").write_text("half")
        assert recover(tmp_path / "run") is None
        assert names(tmp_path) == sorted(stay)
        other.communicate(b"\n")
    recover(tmp_path / "run")
    assert names(tmp_path) == sorted(stay[2:])


def test_a_link_in_the_place_of_a_leftover_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "data").write_text("1")
    (tmp_path / f".run.new-{dead_pid()}").symlink_to("mine")
    recover(tmp_path / "run")
    assert names(tmp_path) == ["mine"]
    assert names(tmp_path / "mine") == ["data"]


# --- kills and other processes: in a subprocess, which forks and kills its children

CHILDREN = """
import json, os, shutil, signal, sys, time, types
from pathlib import Path

source, mode, root = sys.argv[1], sys.argv[2], Path(sys.argv[3])
for name, folder in (("kapsi", source), ("kapsi.training", source + "/training")):
    # packages without their __init__, which imports torch: seconds, and threads that do not go with forks
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from kapsi.training.run_folder import NewRun, open_run, recover

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.utime", "os.link", "os.symlink",
           "shutil.copyfile", "shutil.copytree", "shutil.rmtree", "os.listdir", "os.scandir"}

def write(path, which):
    with NewRun(path, overwrite=True) as run:
        (run.folder / "model").write_text("model of " + which)
        (run.folder / ("only_" + which)).write_text(which)
        run.manifest = {"which": which}

def killed_at(count, act):
    def step(event, args):
        nonlocal count
        if event in CHANGES:
            count -= 1
            if count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if child == 0:
        try:
            os.fsync = lambda handle: step("open", ())
            sys.addaudithook(step)
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def fork(act):
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as error:
            sys.stderr.write(repr(error) + chr(10))
            os._exit(1)
        os._exit(0)
    return child

os.fsync = lambda handle: None
if mode == "kill":
    states, codes = [], []
    for count in range(1, 1000):
        folder = root / str(count)
        shutil.copytree(root / "start", folder, symlinks=True)
        act = (lambda: recover(folder / "run")) if sys.argv[4] == "recover" else (lambda: write(folder / "run", "new"))
        codes.append(killed_at(count, act))
        states.append(sorted(os.listdir(folder)))
        if codes[-1] != -signal.SIGKILL:
            break
    json.dump({"codes": codes, "states": states}, sys.stdout)
else:
    path = root / "run"
    end = time.monotonic() + 1.0
    def writing(which):
        while time.monotonic() < end:
            write(path, which)
    def reading():
        while time.monotonic() < end:
            open_run(path)
    def recovering():
        while time.monotonic() < end:
            recover(path)
    children = [fork(lambda which=which: writing(which)) for which in "abc"] + [fork(reading), fork(recovering)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    json.dump({"codes": codes}, sys.stdout)
"""


def children(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-B", "-c", CHILDREN, str(SOURCE.parents[1]), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def start_with_run_and_notes(tmp_path: Path) -> Path:
    path = tmp_path / "start" / "run"
    make(path)
    (path / "notes").mkdir()
    (path / "notes" / "a.txt").write_text("mine")
    (path / "b.txt").write_text("mine too")
    return path


def whole(path: Path) -> str:
    """Return which run is there after verifying all of it, the user's notes and that nothing is left beside."""
    which: str = open_run(path)["which"]
    check(path, which)
    assert (path / "notes" / "a.txt").read_text() == "mine"
    assert (path / "b.txt").read_text() == "mine too"
    assert names(path) == ["b.txt", "model", "notes", f"only_{which}", "run.json"]
    assert names(path.parent) == ["run"]
    return which


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_run_whole(tmp_path: Path) -> None:
    start_with_run_and_notes(tmp_path)
    result = children("kill", tmp_path, "replace")
    codes, states = result["codes"], result["states"]
    assert codes == [-9] * (len(codes) - 1) + [0]
    assert len(codes) > 30
    seen = [whole(tmp_path / str(count) / "run") for count in range(1, len(codes) + 1)]
    turn = seen.index("new")
    assert seen == ["old"] * turn + ["new"] * (len(seen) - turn)  # once new, never old again
    assert 10 < turn < len(seen) - 2
    assert any(".run.old" in state and "run" not in state for state in states)  # between the two renames
    assert any(".run.old" in state and "run" in state for state in states)
    assert any(name.startswith(".run.gone-") for state in states for name in state)


def test_a_kill_of_the_first_fit_leaves_nothing_or_the_whole_run(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    result = children("kill", tmp_path, "fresh")
    count = len(result["codes"])
    assert result["codes"] == [-9] * (count - 1) + [0]
    seen = []
    for folder in (tmp_path / str(number) for number in range(1, count + 1)):
        recover(folder / "run")
        seen.append(names(folder))
        if seen[-1]:
            check(folder / "run", "new")
    turn = seen.index(["run"])
    assert seen == [[]] * turn + [["run"]] * (count - turn)
    assert turn > 5


@pytest.mark.parametrize("there", [False, True])
def test_a_kill_while_recovering_loses_nothing_either(tmp_path: Path, there: bool) -> None:
    path = start_with_run_and_notes(tmp_path)
    old = path.parent / ".run.old"
    path.rename(old)
    shutil.copytree(old, path.parent / f".run.new-{dead_pid()}")
    if there:
        shutil.copytree(old, tmp_path / "other")
        make(tmp_path / "other", "new", overwrite=True)
        (tmp_path / "other").rename(path)
    result = children("kill", tmp_path, "recover")
    codes = result["codes"]
    assert codes == [-9] * (len(codes) - 1) + [0]
    assert len(codes) > 5
    for count in range(1, len(codes) + 1):
        assert whole(tmp_path / str(count) / "run") == ("new" if there else "old")


def test_processes_that_write_the_same_run_at_once(tmp_path: Path) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "note").write_text("mine")
    assert children("race", tmp_path)["codes"] == [0] * 5
    check(tmp_path / "run", open_run(tmp_path / "run")["which"])
    assert open_run(tmp_path / "run")["which"] in "abc"
    assert (tmp_path / "run" / "note").read_text() == "mine"
    assert names(tmp_path) == ["run"]


# --- reading


def test_open_run_of_no_run(tmp_path: Path) -> None:
    with refused(repr(str(tmp_path / "no\nne")), "no such run folder; check the path"):
        open_run(tmp_path / "no\nne")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        with refused("is not a run folder (no run.json)"):
            open_run(tmp_path / name)
    with refused("no such run folder"):
        open_run(tmp_path / "file" / "run")
    with refused("cannot read the run: File name too long; check"):
        open_run(tmp_path / ("y" * 300))


def test_open_run_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    assert open_run(".") == open_run("") == open_run("../run/") == open_run(tmp_path / "run")


def test_files_that_the_user_adds_are_fine(tmp_path: Path) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    check(tmp_path / "run", "old")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "run.json is not JSON"),
        ("{", "run.json is not JSON"),
        ("[" * 100_000, "run.json is not JSON"),
        ("[]", 'run.json has no entry "format": "kapsi run"'),
        ("null", 'run.json has no entry "format"'),
        ("{}", 'run.json has no entry "format"'),
        ('{"format": "kapsi", "format_version": 1, "files": {}}', 'run.json has no entry "format"'),
        ('{"format": "kapsi run", "files": {}}', "run.json has no format_version"),
        ('{"format": "kapsi run", "format_version": true, "files": {}}', "run.json has no format_version"),
        ('{"format": "kapsi run", "format_version": "1", "files": {}}', "run.json has no format_version"),
        ('{"format": "kapsi run", "format_version": 0, "files": {}}', "run.json has no format_version"),
        ('{"format": "kapsi run", "format_version": 1}', "run.json has no list of files"),
        ('{"format": "kapsi run", "format_version": 1, "files": []}', "run.json has no list of files"),
        ('{"format": "kapsi run", "format_version": 1, "files": {"model": 1}}', "the bytes and sha256 of 'model'"),
        ('{"format": "kapsi run", "format_version": 1, "files": {"model": {"bytes": 12}}}', "the bytes and sha256"),
    ],
)
def test_a_damaged_manifest(tmp_path: Path, text: str, part: str) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(text)
    with refused(repr(str(tmp_path / "run")), "damaged run: ", part, "; restore it from a copy, or fit again"):
        open_run(tmp_path / "run")


def test_a_binary_manifest(tmp_path: Path) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_bytes(b"\xff\xff\xff")
    with refused("damaged run: run.json is not JSON"):
        open_run(tmp_path / "run")


def test_a_newer_version(tmp_path: Path) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text('{"format": "kapsi run", "format_version": 3, "data": []}')
    with refused("the run has format version 3, this kapsi reads up to 2; upgrade kapsi"):
        open_run(tmp_path / "run")
    make(tmp_path / "run", "new", overwrite=True)
    check(tmp_path / "run", "new")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "a\\b", "..", ".", "", "c:x", "a\0", "run.json"])
def test_a_manifest_with_a_name_that_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    make(tmp_path / "run")
    (tmp_path / "secret").write_text("1")
    file = tmp_path / "run" / "run.json"
    data = json.loads(file.read_text())
    data["files"][name] = {"bytes": 1, "sha256": hashlib.sha256(b"1").hexdigest()}
    file.write_text(json.dumps(data))
    with refused(f"run.json lists {name!r}, not a plain file name"):
        open_run(tmp_path / "run")


def test_a_file_that_was_changed_or_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "run")
    file = tmp_path / "run" / "model"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with refused("the file 'model' has changed: bytes 11, in run.json 12"):
        open_run(tmp_path / "run")
    file.write_bytes(content[:-1] + b"x")
    with refused("the file 'model' has changed: sha256"):
        open_run(tmp_path / "run")
    file.unlink()
    with refused("the file 'model' is missing"):
        open_run(tmp_path / "run")
    file.mkdir()
    with refused("the file 'model' is missing"):
        open_run(tmp_path / "run")
    file.rmdir()
    file.write_bytes(content)
    check(tmp_path / "run", "old")

    def unreadable(file: Path, *rest: object) -> dict[str, Any]:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(run_folder, "_fingerprint", unreadable)
    with refused("cannot read the run: Permission denied; check"):
        open_run(tmp_path / "run")


# --- free paths


def test_free_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert free_path("run") == Path("run")
    assert free_path("none/run") == Path("none/run")
    Path("run").write_text("")
    assert free_path("run") == free_path("run/") == Path("run-2")
    Path("run-2").symlink_to("nowhere")
    assert free_path(tmp_path / "run") == tmp_path / "run-3"
    Path(".run-3.old").mkdir()  # not ours, but a run there could never be replaced
    assert free_path("run") == Path("run-4")
    Path(".run-4.new-1-elsewhere").mkdir()  # being written
    assert free_path("run") == Path("run-5")
    Path("v1.5").mkdir()
    assert free_path("v1.5") == Path("v1.5-2")
    assert free_path(".") == tmp_path.with_name(f"{tmp_path.name}-2")
    with refused("is the root folder"):
        free_path("/")
    with refused("not a usable path"):
        free_path("a\0")


# --- single files


def test_atomic_replaces_a_file_and_keeps_its_permissions(tmp_path: Path, disk: list[str]) -> None:
    path = tmp_path / "deep" / "model.csv"
    with atomic(str(path)) as temporary:
        assert temporary.parent.parent == path.parent
        assert temporary.suffix == ".csv"
        assert not temporary.exists()
        temporary.write_text("one")
        assert not path.exists()
    assert disk == [temporary.name, "deep"] or "?" in disk
    assert path.read_text() == "one"
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o600)
    link = tmp_path / "link.csv"
    link.symlink_to(path)
    with atomic(link) as temporary:
        temporary.write_text("two")
    assert link.is_symlink()
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(path.parent) == ["model.csv"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_atomic_leaves_the_file_after_an_error(tmp_path: Path, error: Any) -> None:
    path = tmp_path / "model"
    path.write_text("one")

    def write() -> None:
        with atomic(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "one"
    assert names(tmp_path) == ["model"]


def test_atomic_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("one")
    for given in (tmp_path / "folder", "/dev/null"):
        with refused(repr(str(given)), "not a writable regular file"), atomic(given):
            never()
    with refused("is not a folder; give another path"), atomic(tmp_path / "file" / "x"):
        never()
    with refused("cannot write the file: No such file"), atomic(tmp_path / "none"):
        pass  # the block wrote nothing
    with atomic(tmp_path / "file") as temporary:
        temporary.write_text("two")
        with refused("is being written by this process"), atomic(tmp_path / "file"):
            never()
    assert (tmp_path / "file").read_text() == "two"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with refused("not a writable"), atomic(tmp_path / "file"):
            never()
    assert names(tmp_path) == ["file", "folder"]


def test_atomic_removes_files_of_killed_processes(tmp_path: Path) -> None:
    (tmp_path / f".a.csv.new-{dead_pid()}-{files._HOST}.csv").write_text("half")  # of kapsi 0.2
    (left := tmp_path / f".a.csv.new-{dead_pid()}-{files._HOST}").mkdir()
    (left / ".tmpx3Yz").write_text("half")
    with atomic(tmp_path / "a.csv") as temporary:
        temporary.write_text("whole")
    assert names(tmp_path) == ["a.csv"]


def test_atomic_holds_temporary_files_of_other_libraries(tmp_path: Path) -> None:
    """safetensors writes a file of its own beside the given path and renames it; a kill may come in between."""
    with atomic(tmp_path / "a.csv") as temporary:
        temporary.write_text("whole")
        (temporary.parent / ".tmpx3Yz").write_text("half")
        assert names(tmp_path) == [temporary.parent.name]
    assert names(tmp_path) == ["a.csv"]


# --- JSON


def test_a_failure_takes_the_folders_away_that_were_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for writer in (atomic, NewRun):
        with pytest.raises(ZeroDivisionError), writer(tmp_path / "there/a/b/c"):  # noqa: PT012
            assert (tmp_path / "there/a/b").is_dir()
            raise ZeroDivisionError
        assert names(tmp_path / "there") == []
    with pytest.raises(ZeroDivisionError), NewRun(tmp_path / "there/a/b/c"):  # noqa: PT012
        (tmp_path / "there/a/theirs").touch()
        raise ZeroDivisionError
    assert names(tmp_path / "there/a") == ["theirs"]


def test_write_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": ["é", None]})
    assert (tmp_path / "a.json").read_bytes() == '{\n  "b": 1,\n  "a": [\n    "é",\n    null\n  ]\n}\n'.encode()
    for value in (float("nan"), float("inf"), object(), {(1, 2): 3}, "\udcff"):
        with refused(repr(str(tmp_path / "a.json")), "not JSON", "give plain data, finite numbers"):
            write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1, "a": ["é", None]}  # refused before it was touched
    with refused("cannot write the file: No such file or directory"):
        write_json(tmp_path / "none" / "a.json", {})


def test_append_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "w", encoding="utf-8") as handle:
        append_line(handle, {"epoch": 1, "loss": 0.5})
        assert path.read_text() == '{"epoch": 1, "loss": 0.5}\n'  # flushed
        with refused("metrics.jsonl", "not JSON"):
            append_line(handle, {"loss": float("nan")})
        append_line(handle, {"name": "é\n"})
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == [
        {"epoch": 1, "loss": 0.5},
        {"name": "é\n"},
    ]


# --- the module


def test_the_modules_need_the_standard_library_and_filelock() -> None:
    imported = set()
    sources = [SOURCE.read_text(encoding="utf-8"), Path(files.__file__).read_text(encoding="utf-8")]
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            imported.add(module if module in ("kapsi.errors", "kapsi.files") else module.split(".")[0])
    assert imported <= sys.stdlib_module_names | {"kapsi.errors", "kapsi.files", "filelock"}
    assert "pickle" not in imported


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which no file can be created")
def test_a_folder_without_files_is_refused_at_once() -> None:
    """The permissions of /proc allow root to write there."""
    with locked(Path("/proc/.x.lock")):
        assert not Path("/proc/.x.lock").exists()
    with pytest.raises(FileError, match="'/proc' cannot be written to; give another --output"):
        check_place("/proc/x", "run", "give another --output")
