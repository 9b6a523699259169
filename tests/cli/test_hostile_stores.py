"""Stores and files that somebody else has prepared: no path outside is touched, no memory taken as one says.

What lies outside is precious: sound objects and documents, so that nothing but the way to them stops a verb.
"""

import io
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.support.sample_stores import TOKENS, store_prompts
from tests.support.tool import call, refused

TOOL = [sys.executable, "-c", "from tplayout.cli.main import main; main()"]
GIB = 2**30
TIB = 2**40
NOW = ["--grace", "0", "--yes"]


class Place:
    """A directory with a store, what is precious beside it, and room for what verbs write."""

    def __init__(self, root: Path) -> None:
        self.root, self.store, self.outside, self.target = root, root / "store", root / "outside", root / "target"
        self.name = store_prompts(self.store, TOKENS, [9] * 8)
        self.outside.mkdir()
        (self.outside / "passwd").write_bytes(b"root:x:0:0\n" * 400)
        self.tokens = root / "tokens.json"
        self.tokens.write_text(json.dumps(TOKENS))
        self.bundle, self.sound = root / "bundle", root / "sound"
        store_prompts(self.sound, TOKENS)
        assert call("export", self.sound, self.bundle).exit_code == 0

    @property
    def objects(self) -> list[Path]:
        return sorted((self.store / self.name).rglob("*.safetensors"))

    def lead_out(self, path: Path, dangling: bool = False) -> None:
        """Move what is at `path` outside, or away, and put a link to that place where it was."""
        there = self.outside / path.relative_to(self.store)
        there.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            shutil.move(path, there)
        elif not dangling:
            there.mkdir(parents=True)
        if dangling:
            there.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(there)

    def looked_at(self) -> dict[str, object]:
        """All that could change outside: names, content, modes, times of writing."""
        found: dict[str, object] = {}
        for path in sorted(self.outside.rglob("*")):
            about = path.lstat()
            content = path.read_bytes() if path.is_file() else None
            found[str(path)] = (content, stat.filemode(about.st_mode), about.st_mtime_ns, about.st_ctime_ns)
        return found

    def leaked(self) -> set[str]:
        """Files that verbs wrote and that hold what a file outside does."""
        hidden = {path.read_bytes() for path in self.outside.rglob("*") if path.is_file()}
        files = [path for path in self.target.rglob("*") if path.is_file()]
        return {str(path) for path in files if any(data in path.read_bytes() for data in hidden)}


def document(place: Place) -> None:
    """One that is sound, and names the model in its own way, which tells whether it was read."""
    path = place.store / place.name / "namespace.json"
    place.lead_out(path)
    there = path.readlink()
    there.write_bytes(there.read_bytes().replace(b'"model": "m"', b'"model": "precious"'))


LINKS: dict[str, Callable[[Place], None]] = {
    "namespace": lambda place: place.lead_out(place.store / place.name),
    "fan-out": lambda place: place.lead_out(place.objects[0].parent),
    "object": lambda place: place.lead_out(place.objects[0]),
    "object to nowhere": lambda place: place.lead_out(place.objects[0], dangling=True),
    "document": document,
    "quarantine": lambda place: place.lead_out(place.store / "tplayout-quarantine"),
    "new namespace": lambda place: place.lead_out(place.store / ("ab" * 16)),
}

VERBS: dict[str, Callable[[Place], list[object]]] = {
    "ls": lambda p: ["ls", p.store],
    "ls namespace": lambda p: ["ls", p.store, p.name],
    "du": lambda p: ["du", p.store],
    "du age": lambda p: ["du", p.store, "--by", "age"],
    "verify": lambda p: ["verify", p.store],
    "verify quick": lambda p: ["verify", p.store, "--quick"],
    "verify object": lambda p: ["verify", p.store, "--object", f"{p.name}/{'ab' * 32}.0.safetensors"],
    "quarantine": lambda p: ["verify", p.store, "--quarantine", "--also", "foreign", "--yes"],
    "inspect": lambda p: ["inspect", p.store],
    "inspect chunk": lambda p: ["inspect", p.store, Path(p.name).name[:4]],
    "gc": lambda p: ["gc", p.store, "--max-bytes", "0", *NOW],
    "gc temporaries": lambda p: ["gc", p.store, "--max-age", "0s", "--temporary-age", "0s", *NOW],
    "cp": lambda p: ["cp", p.store, p.target],
    "mv": lambda p: ["mv", p.store, p.target, "--yes"],
    "export": lambda p: ["export", p.store, p.target / "file"],
    "convert": lambda p: ["convert", p.store, p.target, "--chunk-tokens", "2"],
    "shards": lambda p: ["convert", p.store, p.target, "--tp", "2"],
    "doctor": lambda p: ["doctor", p.store, "--size", "64K"],
    "cp into": lambda p: ["cp", p.sound, p.store],
    "mv into": lambda p: ["mv", p.sound, p.store, "--yes"],
    "import into": lambda p: ["import", p.bundle, p.store],
    "convert into": lambda p: ["convert", p.sound, p.store, "--codec", "shuffle-zstd"],
}


def ended_well(result: Result) -> None:
    """With an answer or one line, never with a traceback."""
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code in (0, 1, 2, 3), result.output
    assert "Traceback" not in result.output


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("link", LINKS)
def test_no_verb_follows_a_link_out_of_the_store(tmp_path: Path, link: str) -> None:
    for verb, arguments in VERBS.items():
        (tmp_path / verb).mkdir()
        place = Place(tmp_path / verb)
        LINKS[link](place)
        before = place.looked_at()
        result = call(*arguments(place))
        ended_well(result)
        assert place.looked_at() == before, verb
        assert place.leaked() == set(), verb
        assert "root:x:0:0" not in result.output, verb
        assert "precious" not in result.output, verb


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "..", "a/../../outside", ".", "~", "a" * 5000, "\udcff", "$(id)"]
)
def test_names_given_by_hand_lead_nowhere(place: Place, name: str) -> None:
    before = place.looked_at()
    for arguments in (
        ["ls", place.store, name],
        ["du", place.store, name],
        ["inspect", place.store, name],
        ["verify", place.store, "--namespace", name],
        ["verify", place.store, "--object", name],
        ["verify", place.store, "--object", name, "--quarantine", "--yes"],
        ["gc", place.store, "--keep", name, "--max-bytes", "0", *NOW],
        ["gc", place.store, "--namespace", name, "--max-bytes", "0", *NOW],
        ["cp", place.store, place.target, "--namespace", name],
        ["cp", place.store, place.target, "--prefix", name],
        ["export", place.store, place.target / "file", "--prefix", name],
        ["convert", place.store, place.target, "--prefix", name, "--tp", "1"],
    ):
        result = call(*arguments)
        ended_well(result)
        assert result.exit_code != 0, arguments
        assert len(result.stderr.splitlines()) <= 1, arguments
    assert place.looked_at() == before
    assert len(place.objects) == 6


class Tar:
    """Archives that `tarfile` would not write."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, name: str, data: bytes = b"", size: int | None = None, kind: bytes = tarfile.REGTYPE) -> "Tar":
        info = tarfile.TarInfo(name)
        info.size, info.type, info.linkname = len(data), kind, "../outside/passwd"
        header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
        if size is not None:
            header[124:136] = b"\x80" + size.to_bytes(11, "big") if size >= 8**11 else b"%011o\0" % size
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
        self.data += header + data + bytes(-len(data) % 512)
        return self

    def write(self, path: Path) -> Path:
        path.write_bytes(self.data + bytes(1024))
        return path


HOSTILE_MEMBERS = {
    "up": Tar().add("../outside/passwd", b"x"),
    "absolute": Tar().add("/etc/passwd", b"x"),
    "up from a namespace": Tar().add("{name}/../../outside/passwd", b"x"),
    "symbolic link": Tar().add("{name}/aa", kind=tarfile.SYMTYPE),
    "hard link": Tar().add("{name}/aa", kind=tarfile.LNKTYPE),
    "device": Tar().add("{name}/aa", kind=tarfile.CHRTYPE),
    "pipe": Tar().add("{name}/aa", kind=tarfile.FIFOTYPE),
    "sparse": Tar().add("{name}/aa", kind=tarfile.GNUTYPE_SPARSE),
    "long name": Tar().add("{name}/aa", b"../" * 2000, kind=tarfile.GNUTYPE_LONGNAME),
    "pax": Tar().add("{name}/aa", b"30 path=../../outside/passwd\n\n", kind=tarfile.XHDTYPE),
    "claims 8 GiB": Tar().add("{name}/aa", b"x", size=8**11 - 1),
    "claims 2^80 bytes": Tar().add("{name}/aa", b"x", size=2**80),
}


@pytest.mark.parametrize("what", HOSTILE_MEMBERS)
@pytest.mark.parametrize("first", [True, False])
def test_a_hostile_archive_writes_nothing_but_its_sound_objects(place: Place, what: str, first: bool) -> None:
    """first: the member comes before the document; or behind it and an object."""
    with tarfile.open(place.bundle) as archive:
        members = [(info.name, archive.extractfile(info).read()) for info in archive.getmembers()]  # type: ignore[union-attr]
    hostile = bytes(HOSTILE_MEMBERS[what].data).replace(b"{name}", place.name[:6].encode())
    out = Tar()
    if not first:
        for name, data in members:
            out.add(name, data)
    out.data += hostile
    path = out.write(place.root / "hostile")
    before = place.looked_at()
    result = call("import", path, place.target)
    ended_well(result)
    assert result.exit_code == 1
    assert place.looked_at() == before
    written = [path for path in place.target.rglob("*") if path.is_file()]
    assert not (first and written)
    assert {path.name for path in written} <= {Path(name).name for name, _ in members}
    assert all(path.is_relative_to(place.target / place.name) and not path.is_symlink() for path in written)


def test_a_name_that_comes_twice_is_the_same_object_or_named(place: Place) -> None:
    """The second one is damaged, or foreign: what is stored is sound whichever comes first."""
    with tarfile.open(place.bundle) as archive:
        members = [(info.name, archive.extractfile(info).read()) for info in archive.getmembers()]  # type: ignore[union-attr]
    bad = members[1][1][:-1] + bytes([members[1][1][-1] ^ 1])
    for order in ([members[1][1], bad], [bad, members[1][1]], [members[1][1]] * 2):
        out = Tar()
        for name, data in (members[0], *((members[1][0], data) for data in order), *members[2:]):
            out.add(name, data)
        result = call("import", out.write(place.root / "twice"), place.target)
        ended_well(result)
        assert result.exit_code == (1 if bad in order else 0)
        assert call("verify", place.target).exit_code == 0
        assert len(list(place.target.rglob("*.safetensors"))) == 4
        shutil.rmtree(place.target)


DOCUMENTS = {
    "empty": b"",
    "no JSON": b"\x00" * 100,
    "not UTF-8": b'{"tplayout": "\xff\xfe"}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"identity":' * 50_000 + b"1" + b"}" * 50_000,
    "twice": b'{"tplayout": 1, "tplayout": 1}',
    "a number of 2 million digits": b'{"tplayout": ' + b"9" * 2_000_000 + b"}",
    "4 MiB of members": b"{" + b",".join(b'"%07d":0' % n for n in range(360_000)) + b"}",
    "another version": b'{"tplayout": 2}',
    "surrogates": b'{"model": "\\ud800"}',
    "list": b"[]",
    "NaN": b'{"tplayout": NaN}',
}


@pytest.mark.parametrize("what", DOCUMENTS)
def test_hostile_documents_are_one_line_in_every_verb(place: Place, what: str) -> None:
    (place.store / place.name / "namespace.json").write_bytes(DOCUMENTS[what])
    before = place.looked_at()
    for verb, arguments in VERBS.items():
        if "age" not in verb and verb != "doctor":
            ended_well(call(*arguments(place)))
    assert place.looked_at() == before


def test_a_damaged_document_of_a_target_is_named(place: Place) -> None:
    """With its store: two of them are in the command."""
    store_prompts(place.target, TOKENS)
    path = place.target / place.name / "namespace.json"
    path.write_bytes(path.read_bytes()[:300])
    for verb in ("cp", "mv"):
        more = ["--yes"] if verb == "mv" else []
        assert (
            f"file://{place.target}: {place.name}/namespace.json: not-json"
            in call(verb, place.store, place.target, *more).stderr
        )
    assert str(path) in refused("import", place.bundle, place.target, code=1).replace(": ", "/")
    assert str(path) in refused("convert", place.store, place.target, "--codec", "none", code=1).replace(": ", "/")


def limited(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The tool in an address space in which nothing of GiB has room."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 * GIB // 2, 3 * GIB // 2))

    return subprocess.run(
        [*TOOL, *map(str, arguments)],
        capture_output=True, text=True, timeout=120, preexec_fn=limit,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip


def huge(path: Path, size: int = TIB) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(size)


def test_files_that_claim_or_have_terabytes_take_no_memory(place: Place) -> None:
    """Objects and documents of 1 TiB (holes), and headers that claim as much."""
    first, second, third = place.objects[:3]
    huge(first)
    second.write_bytes((2**40).to_bytes(8, "little") + second.read_bytes()[8:])
    huge(third, 2 * GIB)
    (place.store / "foreign").write_bytes(b"")
    huge(place.store / "foreign", 2 * GIB)
    other = place.store / ("cd" * 16)
    other.mkdir()
    huge(other / "namespace.json")
    for arguments, code in (
        (["ls", place.store], 0),
        (["verify", place.store], 1),
        (["verify", place.store, "--quick"], 1),
        (["inspect", place.store, first.name[:10]], 1),
        (["inspect", place.store, second.name[:10]], 1),
        (["cp", place.store, place.target], 1),
        (["inspect", place.store, third.name[:10]], 1),
        (["verify", place.store, "--quarantine", "--also", "foreign", "--yes"], 1),
        (["gc", place.store, "--max-bytes", "0", *NOW], 1),  # what is foreign stays
    ):
        done = limited(*arguments)
        assert (done.returncode, "Traceback" in done.stderr, "MemoryError" in done.stderr) == (code, False, False), done
    assert call("verify", place.target).exit_code == 0


def test_other_files_that_claim_terabytes_take_no_memory(place: Place) -> None:
    """Archives, prompts and shards."""
    assert call("convert", place.sound, place.root / "shards", "--tp", "1").exit_code == 0
    (shard,) = (place.root / "shards").rglob("*.safetensors")
    data = shard.read_bytes()
    files = {name: place.root / name for name in ("archive", "claims", "tokens")}
    huge(files["archive"])
    Tar().add(f"{place.name}/namespace.json", b"x", size=TIB).write(files["claims"])
    huge(files["claims"], 2 * TIB)
    huge(files["tokens"], 12 * GIB)
    cases = [
        ["import", files["archive"], place.target],
        ["import", files["claims"], place.target],
        ["cp", place.sound, place.target, "--tokens", files["tokens"]],
    ]
    for arguments in cases:
        done = limited(*arguments)
        assert (done.returncode in (1, 2), len(done.stderr.splitlines())) == (True, 1), (arguments, done)
    for header in ((2**40).to_bytes(8, "little"), (2**63).to_bytes(8, "little"), bytes(8)):
        shard.write_bytes(header + data[8:])
        done = limited("convert", place.root / "shards", place.target)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done
    assert not place.target.exists() or not list(place.target.rglob("*.safetensors"))


def test_a_line_for_people_holds_no_control_characters(place: Place) -> None:
    """Names of files of others reach the terminal of who looks at them."""
    (place.store / "\x1b]0;owned\x07\n\x1b[31m").write_bytes(b"")
    with io.StringIO() as seen:
        for verb in ("ls", "du", "verify", "verify quick", "quarantine", "gc"):
            seen.write(call(*VERBS[verb](place)).output)
        assert not {char for char in seen.getvalue() if ord(char) < 32} - {"\n"}
    assert "owned" in refused("ls", place.store, "\x1b]0;owned")
