"""A bundle is a store in one file: whole, deterministic, and strictly read."""

import dataclasses
import io
import os
import tarfile

import pytest

from tplayout.admin.bundle import export_prefixes, import_bundle
from tplayout.admin.catalog import Secrets
from tplayout.admin.chains import build_index
from tplayout.admin.namespaces import begin_namespace, open_namespace
from tplayout.admin.work import Work
from tplayout.errors import ConfigError, FormatError, NotFound, Reason, Unavailable
from tplayout.format.keys import object_name

SECRET = b"0123456789abcdef"


@pytest.fixture
def filled(kit, store):
    namespace, _ = kit.fill(store, kit.identity(kit.group(), kit.group("window-5", "window", window=5)))
    kit.fill(store, namespace.identity, [*kit.TOKENS[:8], 1, 2, 3, 4])
    return namespace


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompt.tplayout"


@pytest.fixture
def target(make_store):
    return make_store("target")


def test_out_and_in(filled, kit, target, file):
    done = export_prefixes(build_index(filled), None, file, work=Work(jobs=3))
    assert (done.prefixes, done.objects) == (2, 12)
    assert done.nbytes == file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o600
    report = import_bundle(file, target, work=Work(jobs=2))
    assert kit.content(target) == kit.content(filled.store)
    assert (report.objects, report.present) == (12, 0)
    again = import_bundle(file, target)
    assert (again.objects, again.present) == (0, 12)


def test_one_prefix_is_a_function_of_itself(filled, kit, make_store, file, tmp_path):
    index = build_index(filled)
    short = next(path for path in index.prefixes() if len(path) == 3)
    export_prefixes(index, [short[-1]], file)
    target = make_store("few")
    import_bundle(file, target)
    assert len(kit.content(target)) == 1 + 3 * 2
    export_prefixes(build_index(open_namespace(target, filled.name)), None, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


def test_any_tar_makes_a_store_of_it(filled, kit, file, make_store, tmp_path):
    export_prefixes(build_index(filled), None, file)
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path / "plain", filter="data")
    assert kit.tree(tmp_path / "plain") == kit.tree(tmp_path / "store")


def test_damage_stops_an_export_and_leaves_no_file(filled, kit, file, tmp_path):
    name = sorted(kit.content(filled.store))[0]
    data = bytearray(filled.store.get(name))
    data[-5000] ^= 1
    filled.store.put(name, data)
    with pytest.raises(FormatError, match=name):
        export_prefixes(build_index(filled), None, file)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_damage_in_a_file_is_named_and_left_out(filled, kit, file, target):
    export_prefixes(build_index(filled), None, file)
    data = bytearray(file.read_bytes())
    data[-3000] ^= 1  # in the last object
    file.write_bytes(data)
    report = import_bundle(file, target)
    assert (report.objects, len(report.damaged)) == (11, 1)
    assert next(iter(report.damaged)) not in kit.content(target)


def test_dry_runs_write_nothing(filled, file, target):
    assert export_prefixes(build_index(filled), None, file, work=Work(dry_run=True)).objects == 12
    assert not file.exists()
    export_prefixes(build_index(filled), None, file)
    assert import_bundle(file, target, work=Work(dry_run=True)).objects == 12
    assert not list(target.list())


def test_keyed_bundles_need_their_secret(kit, store, target, file):
    namespace, _ = kit.fill(store, kit.identity(), secret=SECRET)
    export_prefixes(build_index(namespace), None, file)
    with pytest.raises(ConfigError, match="secret"):
        import_bundle(file, target)
    import_bundle(file, target, Secrets(SECRET))
    assert kit.content(target) == kit.content(store)


def test_a_store_without_the_secret_that_is_given_is_refused(kit, store, target, file):
    namespace, _ = kit.fill(store, kit.identity(), secret=SECRET)
    kit.fill(target, namespace.identity)
    export_prefixes(build_index(namespace), None, file)
    with pytest.raises(ConfigError, match="written without a secret"):
        import_bundle(file, target, Secrets(SECRET))


def test_what_was_exported_without_a_secret_is_verified_and_then_keyed(kit, store, make_store, target, file):
    namespace, _ = kit.fill(store, kit.identity())
    reference, _ = kit.fill(make_store("reference"), namespace.identity, secret=SECRET)
    export_prefixes(build_index(namespace), None, file)
    assert not import_bundle(file, target, Secrets(SECRET)).keyed
    assert kit.content(target) == kit.content(reference.store)


def archive(path, *members) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as out:
        for name, data, kind in members:
            info = tarfile.TarInfo(name)
            info.type, info.size = kind, len(data)
            out.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("what", ["empty", "text", "cut", "cut in header", "no document", "link", "directory", "pax"])
def test_what_is_no_bundle_is_refused(filled, file, target, what):
    export_prefixes(build_index(filled), None, file)
    data = file.read_bytes()
    if what == "empty":
        file.write_bytes(b"")
    elif what == "text":
        file.write_bytes(os.urandom(5000))
    elif what == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif what == "cut in header":
        file.write_bytes(data[:300])
    elif what == "no document":
        archive(file, ("a/b", b"x", tarfile.REGTYPE))
    elif what == "link":
        archive(file, (f"{filled.name}/namespace.json", b"", tarfile.SYMTYPE))
    elif what == "directory":
        archive(file, (f"{filled.name}", b"", tarfile.DIRTYPE))
    else:
        with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as out:
            out.addfile(tarfile.TarInfo("é" * 200))
    with pytest.raises(FormatError, match=file.name):
        import_bundle(file, target)
    assert not list(target.list())


def test_members_that_do_not_belong_are_named(filled, kit, file, target):
    name = object_name(filled.name, next(iter(build_index(filled).chunks)), 0)
    other = name.replace(filled.name, "0" * 32)
    document = filled.document.to_bytes()
    archive(
        file,
        (f"{filled.name}/namespace.json", document, tarfile.REGTYPE),
        ("../../etc/passwd", b"x", tarfile.REGTYPE),
        (other, b"x", tarfile.REGTYPE),
        (name, b"short", tarfile.REGTYPE),
        (name.replace(".0.", ".9."), b"x", tarfile.REGTYPE),
    )
    report = import_bundle(file, target)
    assert set(report.damaged) == {"../../etc/passwd", other, name, name.replace(".0.", ".9.")}
    for reason in (Reason.BAD_NAME, Reason.WRONG_NAMESPACE, Reason.TRUNCATED, Reason.WRONG_GROUP):
        assert any(reason.value in text for text in report.damaged.values())
    assert [info.key for info in target.list()] == [f"{filled.name}/namespace.json"]


def test_nothing_to_export_is_an_answer(kit, store, file):
    namespace, _ = kit.fill(store, kit.identity(), kit.TOKENS[:3])
    with pytest.raises(NotFound):
        export_prefixes(build_index(namespace), None, file)


@pytest.fixture
def packed(kit, make_store):
    namespace, _ = kit.fill(make_store("packed"), kit.identity(), codec="shuffle-zstd")
    return namespace


def test_packed_objects_go_out_and_in_as_they_are(packed, kit, target, file):
    done = export_prefixes(build_index(packed), None, file)
    assert done.nbytes == file.stat().st_size
    assert import_bundle(file, target, work=Work(dry_run=True)).objects == 5
    assert import_bundle(file, target).objects == 5
    assert kit.content(target) == kit.content(packed.store)
    assert import_bundle(file, target).present == 5


def test_a_store_that_has_the_namespace_keeps_its_codec(packed, kit, make_store, file, tmp_path):
    plain, reference = make_store("plain"), make_store("reference")
    kit.fill(reference, packed.identity)
    begin_namespace(plain, packed.identity, "a-model")
    export_prefixes(build_index(packed), None, file)
    report = import_bundle(file, plain)
    assert import_bundle(file, plain, work=Work(dry_run=True)).present == report.objects
    assert kit.content(plain) == kit.content(reference)
    assert report.nbytes == sum(info.size for info in plain.list() if info.key.endswith(".safetensors"))
    export_prefixes(build_index(open_namespace(plain, packed.name)), None, tmp_path / "plain.tplayout")
    again = make_store("again")
    begin_namespace(again, packed.identity, "a-model", codec="shuffle-zstd")
    import_bundle(tmp_path / "plain.tplayout", again)
    assert kit.content(again) == kit.content(packed.store)


def test_damage_in_packed_members_is_named(packed, kit, target, file):
    export_prefixes(build_index(packed), None, file)
    data = bytearray(file.read_bytes())
    with tarfile.open(file) as archive:
        members = archive.getmembers()[1:]
    data[members[0].offset_data + members[0].size - 1] ^= 1
    file.write_bytes(data)
    report = import_bundle(file, target)
    assert list(report.damaged) == [members[0].name]
    assert "digest-mismatch" in report.damaged[members[0].name]
    assert report.objects == 4


def test_an_object_that_is_replaced_while_it_is_exported_stops_the_export(packed, file, monkeypatch):
    """A sound one of another size: another version of the library may have packed it."""
    index = build_index(packed)
    chunk = next(iter(index.chunks.values()))
    chunk.objects[0] = dataclasses.replace(chunk.objects[0], size=chunk.objects[0].size + 1)
    with pytest.raises(Unavailable, match="run it again"):
        export_prefixes(index, None, file)
    assert not file.exists()
