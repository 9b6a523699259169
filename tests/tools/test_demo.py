"""The demo's own judgement, without a server: what passes, what does not, and what it prints."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))

import demo
import vllm_server
from vllm_server import Answer

COLD = demo.Row("TP=4", "story", Answer("The keeper.", 1359, 0, 3.0, 4.0), 0)
WARM = demo.Row("TP=2", "same story", Answer("The keeper.", 1359, 1280, 0.3, 1.0), 1280)
OTHER = demo.Row("TP=2", "other", Answer("The boy.", 1211, 512, 1.0, 2.0), 512)
OTHER_COLD = demo.Row("TP=2", "other, cold", Answer("The boy.", 1211, 0, 2.0, 3.0), 0)
LINE = "demo: TP=4 -> TP=2 reloaded 1280 of 1359 prompt tokens; text identical: yes"


def test_a_good_run_passes() -> None:
    assert demo.verdict(COLD, WARM, OTHER, OTHER_COLD) == (LINE, [])


def changed(row: demo.Row, from_store: int | None = None, **answer: object) -> demo.Row:
    row = replace(row, answer=replace(row.answer, **answer))  # type: ignore[arg-type]
    return row if from_store is None else replace(row, from_store=from_store)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((COLD, changed(WARM, text="A dog."), OTHER, OTHER_COLD), "another text than TP=4"),
        ((COLD, changed(WARM, cached_tokens=1024), OTHER, OTHER_COLD), "1024 tokens were reloaded"),
        ((COLD, changed(WARM, from_store=0), OTHER, OTHER_COLD), "only 0 of the reloaded"),
        ((changed(COLD, cached_tokens=256), WARM, OTHER, OTHER_COLD), "TP=4, story: not cold, 256 tokens"),
        ((COLD, WARM, OTHER, changed(OTHER_COLD, cached_tokens=9)), "other, cold: not cold, 9 tokens"),
        ((COLD, WARM, changed(OTHER, text="A dog."), OTHER_COLD), "second prompt"),
        ((COLD, WARM, changed(OTHER, from_store=0), OTHER_COLD), "took nothing from the store"),
    ],
)
def test_a_bad_run_fails(rows: tuple[demo.Row, ...], words: str) -> None:
    line, wrong = demo.verdict(*rows)
    assert len(wrong) == 1
    assert words in wrong[0]
    assert line.startswith("demo: TP=4 -> TP=2 reloaded ")


def test_text_that_differs_is_said_in_the_last_line() -> None:
    assert demo.verdict(COLD, changed(WARM, text="A dog."), OTHER, OTHER_COLD)[0] == LINE.replace("yes", "no")


@pytest.mark.parametrize(("tokens", "full"), [(1359, 1280), (255, 0), (256, 255), (257, 256), (1280, 1279)])
def test_full_chunks(tokens: int, full: int) -> None:
    assert demo.full_chunks(tokens) == full


def test_prompts_share_their_first_half_and_differ_after_it() -> None:
    prompts = demo.read_prompts()
    same = len(demo.os.path.commonprefix([prompts.story, prompts.other]))
    assert 0.4 < same / len(prompts.story) < 0.65
    assert 0.4 < same / len(prompts.other) < 0.65
    assert not prompts.story.startswith(prompts.warm_up[:20])
    assert len(prompts.story.split()) > 900  # more than 1,000 tokens


def test_the_table_is_aligned_and_short() -> None:
    lines = demo.table([COLD, changed(WARM, text="word " * 50)]).splitlines()
    assert len(lines) == 4
    assert all(len(line) < 130 for line in lines)
    starts = {re.match(r"(\S+ +)", line).end() for line in lines}  # type: ignore[union-attr]
    assert len(starts) == 1


def test_metrics_are_parsed_and_summed() -> None:
    text = '# HELP x y\n# TYPE x counter\nx{a="1",b="2 3"} 2.0\nx{a="2"} 3.5e1\ny 7\n'
    assert vllm_server.parse_metrics(text) == {'x{a="1",b="2 3"}': 2.0, 'x{a="2"}': 35.0, "x": 37.0, "y": 7.0}


def test_a_server_that_ends_at_once_is_one_clear_error(tmp_path: Path) -> None:
    server = vllm_server.VLLMServer(tmp_path, 1, tmp_path / "log", env={"PYTHONPATH": str(tmp_path)})
    (tmp_path / "vllm.py").write_text("raise SystemExit('this stands for vLLM')")
    with pytest.raises(vllm_server.ServerError, match=r"status 1 at start\nlog: .*\n  \| this stands for vLLM"):
        server.start(timeout=30)
    assert server.stop() < 10  # and not the minute that a server may take
    assert server.settle(1)


def test_the_store_below_a_given_url_is_new_each_time() -> None:
    urls = []
    for _ in range(2):
        with demo.store("memory://bucket/kv/", False, demo.Progress()) as (url, env):
            urls.append(url)
            assert env == {}
    assert all(re.fullmatch(r"memory://bucket/kv/demo-[0-9a-f-]+", url) for url in urls)
    assert urls[0] != urls[1]
