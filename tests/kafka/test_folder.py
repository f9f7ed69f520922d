import os
import time

import pytest

from loom.errors import ConfigError
from loom.stores.kafka.folder import STALE_S, FolderLock, sweep


def age(folder, seconds):
    for file in (*folder.iterdir(), folder):
        os.utime(file, (time.time() - seconds, time.time() - seconds))


def test_a_folder_is_of_one_process(tmp_path):
    lock = FolderLock(tmp_path / "p" / "n")
    with pytest.raises(ConfigError, match="another process"):
        FolderLock(tmp_path / "p" / "n")
    lock.close()
    lock.close()
    FolderLock(tmp_path / "p" / "n").close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        FolderLock(tmp_path / "file" / "n")


def test_only_what_is_stale_and_free_is_swept(tmp_path):
    young, stale, held = (FolderLock(tmp_path / name) for name in ("young", "stale", "held"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    young.close()
    stale.close()
    for folder in (stale.path, held.path, foreign):
        age(folder, STALE_S + 60)
    sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["foreign", "held", "young"]
    held.close()
