import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from measure.report.sample_bench import sample_bench, sample_case

from shardwise.base.vocabulary.quantities import bytes_text, seconds_text
from shardwise.base.vocabulary.span import busy_seconds
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import Bench, Difference, Equivalence
from shardwise.measure.bench.spread import Spread
from shardwise.measure.report.page.anatomy import anatomy_data
from shardwise.measure.report.page.document import page_of
from shardwise.measure.report.page.markup import Markup, data_script, element
from shardwise.measure.report.page.timeline import timelines
from shardwise.plan.placement import STRATEGIES

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\u2028"
SECTIONS = ["anatomy", "numbers", "memory", "throughput", "step-time", "loss", "timeline", "step-memory", "predicted"]
ENDS = ["absent", "settings"]
FOLDED = ["predicted", "absent", "settings"]


class Read(HTMLParser):
    """A page as a browser reads it: its elements, and the text of some."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def anchors(self) -> list[str]:
        known = {*SECTIONS, *ENDS, "scaling"}
        return [at for _, attributes in self.elements if (at := attributes.get("id")) in known]

    def words(self) -> str:
        return " ".join(text for tag, texts in self.texts.items() if tag not in ("script", "style") for text in texts)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return sample_bench()


def refused(bench: Bench) -> Bench:
    difference = Difference(case="zero2", text="the loss of step 2 is 5.5, that of ddp 5.4", excess=1234.0)
    equivalence = Equivalence(differences=(difference,), largest=1234.0)
    return replace(bench, equivalence=equivalence, recommended=None, why="")


def scaling_row(num_ranks: int) -> dict[str, object]:
    return {
        "num_ranks": num_ranks, "efficiency": 0.9, "strategy": "fsdp", "mesh": {"replicate": 2, "shard": num_ranks // 2},
        "micro_batch": 4, "peak_bytes": {"device": 2**34}, "step_seconds": 0.5, "samples_per_s": 800.0, "exposed_comm_seconds": 0.1,
    }  # fmt: skip


def test_every_section_is_there_in_order(bench: Bench) -> None:
    read = Read(page_of(bench))
    assert read.anchors() == SECTIONS + ENDS
    links = [str(link["href"]).removeprefix("#") for link in read.all("a")]
    assert links == SECTIONS + ENDS, "the contents list what is there"


def test_the_verdict_comes_first_then_the_anatomy_and_settings_are_folded(bench: Bench) -> None:
    text = page_of(bench)
    places = [text.index(part) for part in ('class="answer"', 'class="tiles"', 'id="anatomy"', 'id="numbers"')]
    assert places == sorted(places)
    folded = re.findall(r'<section id="([a-z-]+)" class="folded"><details><summary><h2>', text)
    assert folded == FOLDED
    assert " open" not in " ".join(re.findall("<details[^>]*>", text))


def test_sections_without_data_are_left_out(bench: Bench) -> None:
    bare = [
        replace(case, ledgers=(), tape=(), predicted=None, silent_seconds=None, allocated_bytes=(), losses=())
        for case in bench.cases
        if case.ran
    ]
    read = Read(page_of(replace(bench, cases=tuple(bare))))
    assert read.anchors() == ["numbers", "throughput", "settings"]


def test_scaling_is_shown_and_said_to_be_predicted(bench: Bench) -> None:
    read = Read(page_of(replace(bench, scaling=(scaling_row(8), scaling_row(16)))))
    assert "scaling" in read.anchors()
    assert "More ranks, predicted" in read.texts["h2"]
    assert "fsdp 2 × 8" in read.words()


def test_answer_names_the_recommended_case_and_why(bench: Bench) -> None:
    read = Read(page_of(bench))
    assert read.texts["em"] == ["ddp"]
    assert bench.why in read.words()
    assert "all 7 cases agree" in read.words()


def test_reason_does_not_say_again_what_the_heading_says(bench: Bench) -> None:
    read = Read(page_of(replace(bench, why="Use ddp: 10 samples/s. fsdp holds less.")))
    assert "10 samples/s. fsdp holds less." in read.texts["p"]


def test_unfinished_bench_recommends_nothing(bench: Bench) -> None:
    read = Read(page_of(replace(bench, recommended=None, why="Unfinished: 1 of 4 runs.")))
    assert "Unfinished: 1 of 4 runs." in read.texts["p"]
    assert "em" not in read.texts


def test_refused_bench_ranks_nothing(bench: Bench) -> None:
    read = Read(page_of(refused(bench)))
    words = read.words()
    assert "These cases did not do the same training" in words
    assert "the loss of step 2 is 5.5, that of ddp 5.4; 1,234 times the rounding tolerance" in words
    assert read.anchors() == ["anatomy", "loss", "timeline", "step-memory", *ENDS]
    assert "em" not in read.texts, "nothing is recommended"
    assert not [one for _, one in read.elements if "chosen" in (one.get("class") or "")]
    assert "samples/s" not in words
    assert "Peak memory" not in words


def test_text_of_a_bench_stays_text(bench: Bench) -> None:
    cases = [replace(case, units=tuple(replace(unit, name=HOSTILE) for unit in case.units)) for case in bench.cases]
    cases[0] = replace(
        sample_case("shardwise", "fsdp"), engine=HOSTILE, dtypes={HOSTILE: (HOSTILE,)}, calls={HOSTILE: 1}
    )
    cases.append(CaseResult(engine="torch", strategy=HOSTILE, why_not=HOSTILE))
    hostile = replace(
        bench,
        name=HOSTILE,
        command=HOSTILE,
        why=HOSTILE,
        made=HOSTILE,
        settings={"task.model": HOSTILE, HOSTILE: [HOSTILE]},
        machine={"device": HOSTILE, "torch": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}},
        cases=tuple(cases),
    )
    read, clean = Read(page_of(hostile)), Read(page_of(bench))
    assert read.texts["h1"] == [HOSTILE]
    assert len(read.all("script")) == len(clean.all("script"))
    assert not read.all("img")
    assert not [name for _, one in read.elements for name in one if name.startswith("on") or name == "style"]


def test_differences_of_a_refused_bench_stay_text(bench: Bench) -> None:
    equivalence = Equivalence(differences=(Difference(case=HOSTILE, text=HOSTILE, excess=2.0),), largest=2.0)
    read = Read(page_of(replace(bench, equivalence=equivalence, recommended=None)))
    assert not read.all("img")
    assert HOSTILE in read.texts["b"]


def test_policy_names_every_style_and_script_by_its_hash(bench: Bench) -> None:
    text = page_of(bench)
    policy = next(
        str(meta["content"]) for meta in Read(text).all("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy

    def hashes(contents: list[str]) -> str:
        digests = (hashlib.sha256(one.encode()).digest() for one in contents)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    assert f"style-src {hashes(re.findall('<style>(.*?)</style>', text, re.S))};" in policy
    assert f"script-src {hashes(re.findall('<script>(.*?)</script>', text, re.S))};" in policy


def test_page_without_anatomy_and_timeline_may_run_no_script(bench: Bench) -> None:
    text = page_of(replace(bench, cases=tuple(replace(case, tape=(), predicted=None) for case in bench.cases)))
    assert "<script" not in text
    assert "script-src 'none';" in text.replace("&#x27;", "'")


def test_data_for_a_script_cannot_end_it() -> None:
    data = {"name": HOSTILE + "<!--<script>"}
    script = data_script(data, id_="x")
    inner = script.removeprefix('<script type="application/json" id="x">').removesuffix("</script>")
    assert "<" not in inner
    assert json.loads(inner) == data


def test_element_escapes_all_but_markup() -> None:
    assert element("td", "<b>", Markup("<i></i>"), None, class_='a"b', title=None) == (
        '<td class="a&quot;b">&lt;b&gt;<i></i></td>'
    )
    assert element("line", stroke_width=1.5, x1=2.0) == '<line stroke-width="1.5" x1="2"></line>'


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_case_on_few_ranks_has_a_page(num_ranks: int) -> None:
    one = sample_bench(num_ranks=num_ranks)
    read = Read(page_of(replace(one, cases=one.cases[:1])))
    assert read.all("dl")[0]["aria-label"] == "Key numbers of ddp"
    assert "agree" not in read.words(), "there is nothing that it could agree with"


def test_bench_in_which_nothing_ran_says_why() -> None:
    cases = (CaseResult(engine="torch", strategy="zero1", why_not="torch has no zero1"),)
    read = Read(page_of(replace(sample_bench(), cases=cases, recommended=None, why="")))
    assert read.anchors() == ["absent", "settings"]
    assert "Nothing ran" in read.texts["h2"]
    assert "torch has no zero1" in read.words()


def test_many_cases_of_other_engines_have_a_page(bench: Bench) -> None:
    """No tape, no prediction; a ledger or none."""
    cases = [replace(case, engine="accelerate", tape=(), predicted=None) for case in bench.cases if case.ran] * 3
    cases[1] = replace(cases[1], ledgers=(), reserved_bytes=(2**34,), allocated_bytes=(2**33,))
    read = Read(page_of(replace(bench, cases=tuple(cases[:20]))))
    assert read.all("dl")[0]["aria-label"] == "Key numbers of accelerate ddp"
    assert "not split" in read.words()
    assert "8.00 GiB" in read.words()
    assert read.anchors() == ["numbers", "memory", "throughput", "step-time", "loss", "step-memory", "settings"]


def test_curves_that_coincide_are_said_to(bench: Bench) -> None:
    assert "All 7 curves are the same, to the last digit, at every step." in Read(page_of(bench)).words()
    ran = [case for case in bench.cases if case.ran]
    moved = replace(ran[1], losses=(*ran[1].losses[:-1], ran[1].losses[-1] + 0.5))
    words = Read(page_of(replace(bench, cases=(ran[0], moved)))).words()
    assert "differ by at most 0.5, which is 0.12 of the loss, at step 20" in words


def test_training_that_fell_apart_is_said_to(bench: Bench) -> None:
    losses = (5.0, float("inf"), *[float("nan")] * 18)
    broken = replace(bench.cases[1], losses=losses, grad_norms=(float("nan"),))
    words = Read(page_of(refused(replace(bench, cases=(bench.cases[0], broken))))).words()
    assert "zero1: the loss is no number from step 2 on." in words
    all_broken = replace(broken, losses=losses[1:])
    text = page_of(refused(replace(bench, cases=(all_broken,))))
    assert "zero1: the loss is no number from step 1 on." in text
    assert "polyline" not in text


def test_capacity_far_off_is_said_in_words(bench: Bench) -> None:
    near = page_of(replace(bench, capacity_bytes=20 * 2**20))
    far = page_of(bench)
    assert "capacity 20.0 MiB" in near
    assert 'class="limit"' in near
    assert 'class="limit"' not in far
    assert "The device has 1.00 GiB per rank: the highest peak is 1.7% of it." in far


BAR = re.compile(r'<b>([^<]+)</b></div><svg[^>]*class="track"[^>]*>(.*?)</svg><div class="value">([^<]*)</div>')


def test_pieces_of_every_bar_of_memory_add_up_to_the_peak_beside_it(bench: Bench) -> None:
    """Also where the device counted more than the recording saw."""
    more = [replace(case, allocated_bytes=tuple(2**20 + size for size in case.allocated_bytes)) for case in bench.cases]
    for cases in (bench.cases, tuple(more)):
        ran = [case for case in cases if case.ran]
        text = page_of(replace(bench, cases=cases))
        chart = text[text.index('id="memory"') : text.index('id="throughput"')]
        bars = {name: (drawn, value) for name, drawn, value in BAR.findall(chart)}
        assert list(bars) == [case.name for case in ran]
        highest = 1.02 * max(max(case.peak_bytes, case.predicted.allocated_bytes) for case in ran if case.predicted)
        for case in ran:
            drawn, value = bars[case.name]
            assert value == bytes_text(case.peak_bytes)
            widths = [float(width) for width in re.findall(r'<rect[^>]* width="([0-9.]+)%"', drawn)]
            assert sum(widths) == pytest.approx(100 * case.peak_bytes / highest, abs=0.01)


def test_one_peak_per_case_wherever_it_is_shown(bench: Bench) -> None:
    cases = [
        replace(case, allocated_bytes=tuple(2**20 + size for size in case.allocated_bytes)) for case in bench.cases
    ]
    taller = replace(bench, cases=tuple(cases))
    text = page_of(taller)
    for case in cases:
        if case.ran:
            peak = bytes_text(case.peak_bytes)
            assert re.search(rf"<b>{case.name}</b> peak {re.escape(peak)}, ", text), "memory through one step"
            assert f">{case.name}</b></td>" in text or f">{case.name}</td>" in text
    data = anatomy_data(taller)
    assert data is not None
    for packed in data["cases"]:
        case = next(case for case in cases if case.name == packed["name"])
        assert max(packed["curve"][1]) == case.peak_bytes
        assert max(packed["peaks"]) == case.peak_bytes


def test_timelines_are_as_long_as_the_step_time_of_their_case(bench: Bench) -> None:
    found = timelines(bench)
    assert [one.case.name for one in found] == [case.name for case in bench.cases if case.ran]
    text = page_of(bench)
    section = text[text.index('id="timeline"') : text.index('id="step-memory"')]
    end = max(max(one.seconds, *(span.end for span in one.spans)) for one in found)
    for one, figure in zip(found, re.findall("<figure>(.*?)</figure>", section), strict=True):
        assert one.is_predicted == (not one.case.tape)
        if one.is_predicted:
            assert one.case.predicted is not None
            assert one.seconds == one.case.predicted.step_seconds
            assert f"predicted {seconds_text(one.seconds)}, measured " in figure
        else:
            assert one.case.step_seconds is not None
            assert one.seconds == one.case.step_seconds.median, "the headline's"
            assert max(span.end for span in one.spans) <= one.seconds * (1 + 1e-9)
            assert f"<b>{one.case.name}</b> {seconds_text(one.seconds)}" in figure
            for queue in ("compute", "gather", "reduce"):
                busy = busy_seconds(span for span in one.spans if span.queue == queue)
                assert busy <= one.seconds * (1 + 1e-9), "no queue is busy for longer than the step"
        beds = re.findall(r'<rect y="1" width="([0-9.]+)%" height="15" class="lane">', figure)
        assert [float(bed) for bed in beds] == [pytest.approx(100 * one.seconds / end, abs=0.001)] * len(beds)
        assert beds


def test_exposed_communication_is_that_of_the_timeline_everywhere(bench: Bench) -> None:
    """The headline, the step time and its table, the caption and the hatched part of a timeline show one number."""
    text = page_of(bench)
    timeline = text[text.index('id="timeline"') : text.index('id="step-memory"')]
    step_time = text[text.index('id="step-time"') :]
    end = max(max(one.seconds, *(span.end for span in one.spans)) for one in timelines(bench))
    taped = [case for case in bench.ran if case.tape]
    assert {case.name for case in taped} == set(STRATEGIES)
    for case, figure in zip(taped, re.findall("<figure>(.*?)</figure>", timeline), strict=False):
        seconds = case.exposed_seconds
        assert seconds
        assert f"; {seconds_text(seconds)} of it exposed communication<" in figure
        hatched = re.findall(r'width="([0-9.]+)%" height="15" class="exposed(?: thin)?"', figure)
        assert sum(map(float, hatched)) / 100 * end == pytest.approx(seconds, rel=0.01)
        share = f"{seconds / case.seconds:.0%}"
        assert f"{seconds_text(case.seconds)} · {share} exposed" in step_time
        assert f"{seconds_text(seconds)}, {share}<" in step_time
    assert "(by difference)" in step_time, "torch's engines have no tape"


def test_on_a_gpu_the_timeline_is_of_issues_and_exposed_communication_by_difference(bench: Bench) -> None:
    case = replace(bench.cases[0], reserved_bytes=(2**30,) * bench.num_ranks)
    assert case.silent_seconds is not None
    assert case.exposed_seconds == pytest.approx(case.seconds - case.silent_seconds.median)
    text = page_of(replace(bench, cases=(case,), recommended=0))
    figure = text[text.index('id="timeline"') : text.index('id="step-memory"')]
    assert 'class="exposed' not in figure
    assert "the CPU issued operations" in figure


def test_the_anatomy_says_when_in_a_step_as_long_as_the_headline(bench: Bench) -> None:
    data = anatomy_data(bench)
    assert data is not None
    for packed in data["cases"]:
        case = next(case for case in bench.cases if case.name == packed["name"])
        assert case.step_seconds is not None
        assert 0 < packed["frames"][-1][4] <= round(case.step_seconds.median * 1e6)


@pytest.mark.parametrize("factor", [2.0, 1.0])
def test_exposed_communication_that_is_noise_is_not_measurable_here(bench: Bench, factor: float) -> None:
    """With communication removed the step is longer, or as long, and there is no timeline."""
    cases = []
    for case in bench.cases:
        silent = None if case.step_seconds is None else [factor * one for one in case.step_seconds.values]
        cases.append(case if silent is None else replace(case, silent_seconds=Spread(values=tuple(silent)), tape=()))
    text = page_of(replace(bench, cases=tuple(cases)))
    read = Read(text)
    assert "not measurable here" in read.texts["dd"]
    assert read.texts["td"].count("not measurable here") == 2 * len([case for case in cases if case.ran])
    assert "0%" not in read.texts["dd"] + read.texts["td"]
    assert 'class="exposed"' not in text[text.index('id="step-time"') : text.index('id="loss"')]


def test_a_bench_that_is_too_noisy_says_so_and_chooses_none(bench: Bench) -> None:
    why = "Too noisy to rank: the step times of ddp (±39%) and torch ddp (±10%) overlap. Run more rounds."
    read = Read(page_of(replace(bench, recommended=None, why=why)))
    assert "Too noisy to rank" in read.texts["h2"]
    assert "The step times of ddp (±39%) and torch ddp (±10%) overlap. Run more rounds." in read.texts["p"]
    assert "em" not in read.texts
    assert not [one for _, one in read.elements if "chosen" in (one.get("class") or "").split()]


def test_the_same_number_has_the_same_name_everywhere(bench: Bench) -> None:
    words = Read(page_of(bench)).words()
    for old in ("a second", "wire", "Memory of a rank", "memory a rank", "peak a rank", "held the most", "beside"):
        assert old not in words, old
    for name in ("samples/s", "step time", "exposed communication", "peak per rank", "sent per rank per step"):
        assert name in words
