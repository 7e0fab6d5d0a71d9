from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from models.errors import CacheError
from models.loading import cache
from models.loading.cache import build_once, cache_path, cache_root


def write(content: bytes) -> Callable[[Path], None]:
    def builder(target: Path) -> None:
        target.write_bytes(content)

    return builder


def refuse(target: Path) -> None:
    raise AssertionError("built again")


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_file_is_built_once_and_then_found(cache_folder: Path) -> None:
    path = cache_path("kernels", "abc", ".so")
    assert path.is_relative_to(cache_folder)
    assert path.suffix == ".so"
    assert not path.exists()
    assert build_once(path, write(b"one")) == path
    assert build_once(path, refuse).read_bytes() == b"one"
    assert visible(path.parent) == ["abc.so", "abc.so.sha256"]


def test_the_builder_writes_in_the_same_folder_under_another_name_of_the_same_kind() -> None:
    path = cache_path("kernels", "abc", ".so")
    targets: list[Path] = []

    def builder(target: Path) -> None:
        targets.append(target)
        target.write_bytes(b"x")

    build_once(path, builder)
    assert targets[0] != path
    assert (targets[0].parent, targets[0].suffix) == (path.parent, ".so")


def test_a_builder_that_fails_half_way_leaves_nothing_and_its_error_is_passed_on() -> None:
    path = cache_path("kernels", "abc", ".so")

    def builder(target: Path) -> None:
        target.write_bytes(b"half")
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        build_once(path, builder)
    assert visible(path.parent) == []
    assert build_once(path, write(b"whole")).read_bytes() == b"whole"


def test_a_failed_rebuild_does_not_bring_a_damaged_file_back() -> None:
    path = build_once(cache_path("kernels", "abc", ".so"), write(b"whole"))
    path.write_bytes(b"who")
    with pytest.raises(AssertionError, match="built again"):
        build_once(path, refuse)
    assert build_once(path, write(b"new")).read_bytes() == b"new"


@pytest.mark.parametrize("damage", ["cut", "changed", "no checksum", "wrong checksum", "gone"])
def test_a_damaged_file_is_built_again(damage: str) -> None:
    path = build_once(cache_path("kernels", "abc", ".so"), write(b"whole"))
    checksum = path.with_name("abc.so.sha256")
    match damage:
        case "cut":
            path.write_bytes(b"who")
        case "changed":
            path.write_bytes(b"whale")
        case "no checksum":
            checksum.unlink()
        case "wrong checksum":
            checksum.write_text("0" * 64)
        case "gone":
            path.unlink()
    assert build_once(path, write(b"again")).read_bytes() == b"again"
    assert build_once(path, refuse).read_bytes() == b"again"


def build_slowly(folder: str, log: str) -> None:
    os.environ["OCTAVO_CACHE_DIR"] = folder

    def builder(target: Path) -> None:
        with Path(log).open("a") as file:
            file.write("built\n")
        time.sleep(0.2)
        target.write_bytes(b"x" * 100_000)

    assert build_once(cache_path("kernels", "abc", ".so"), builder).stat().st_size == 100_000


def test_processes_that_start_together_build_once(cache_folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (str(cache_folder), str(tmp_path / "log"))
    processes = [context.Process(target=build_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_the_files_unused_for_longest_are_deleted_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_BYTES", 250)
    paths = [cache_path(kind, key, ".bin") for kind, key in (("a", "1"), ("b", "2"), ("a", "3"))]
    for age, path in zip((300, 200, 100), paths, strict=True):
        build_once(path, write(bytes(80)))
        then = time.time() - age
        os.utime(path, (then, then))
    build_once(paths[0], refuse)  # used just now
    build_once(cache_path("b", "4", ".bin"), write(bytes(80)))
    assert [path.exists() for path in paths] == [True, False, True]
    assert not paths[1].with_name("2.bin.sha256").exists()
    build_once(cache_path("b", "5", ".bin"), write(bytes(1000)))
    assert visible(cache_root() / "b") == ["5.bin", "5.bin.sha256"]


def test_what_a_crashed_build_left_is_deleted_once_it_is_old() -> None:
    path = build_once(cache_path("kernels", "abc", ".so"), write(b"x"))
    old, young = path.with_name(".abc-old.so"), path.with_name(".abc-young.so")
    for leftover in (old, young):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    build_once(cache_path("kernels", "def", ".so"), write(b"y"))
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.parametrize(
    ("kind", "key"), [("..", "a"), ("a/b", "c"), ("a", "../c"), ("a", ""), ("a", "b c"), ("", "c")]
)
def test_a_name_cannot_lead_out_of_the_cache(kind: str, key: str) -> None:
    with pytest.raises(CacheError, match="cannot be the name"):
        cache_path(kind, key, ".so")


def test_the_folder_follows_the_platforms_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "octavo" / cache.FORMAT
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root().is_relative_to(tmp_path / "home")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own" / cache.FORMAT
    assert cache_root().stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_made_is_replaced_by_one_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    path = cache_path("kernels", "abc", ".so")
    assert not path.is_relative_to(tmp_path / "file")
    assert build_once(path, write(b"x")).read_bytes() == b"x"
    assert cache_path("kernels", "abc", ".so") == path


def test_a_full_disk_is_explained_in_one_line() -> None:
    def builder(target: Path) -> None:
        raise OSError(28, "No space left on device")

    path = cache_path("kernels", "abc", ".so")
    with pytest.raises(CacheError, match=r"abc\.so cannot be made \(No space left on device\): free some space"):
        build_once(path, builder)
    assert visible(path.parent) == []
