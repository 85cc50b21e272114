"""Answer checking: given cases, written policies, public reports, limits, and a pool that bombs cannot eat."""

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_bench import verify as verify_module
from jetrl_bench.verify import RULES, Rule, boxed, last_number, self_check, verify, verify_many
from jetrl_bench.verify_math import gold_problem
from jetrl_bench.verify_number import TooCostly, differ, exact
from jetrl_bench.verify_pool import MATH_VERIFY, Pool
from jetrl_bench.verify_text import compact, normalise

DATA = Path(__file__).parent / "data"
BOMBS = [
    r"9^{9^{9}}",
    r"(10^6)!",
    r"2^{2^{40}}",
    r"\sum_{n=1}^{10000000} \frac{n^n}{n+1}",
    r"(x+y+z+1)^{400}",
    r"\prod_{k=1}^{10000000} (k+\sqrt{k})",
]


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2, cpu_limit_s=1.0)
    yield pool
    pool.close()


@pytest.fixture
def data_dir():
    if not os.environ.get("JETRL_DATA_DIR"):
        pytest.skip("JETRL_DATA_DIR is not set")
    return Path(os.environ["JETRL_DATA_DIR"])


def status(gold, answer, pool=None, **options):
    return verify(gold, rf"So \boxed{{{answer}}}.", pool=pool, **options).status


def cpu_s():
    """CPU seconds of this process and of the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def given_cases():
    return [json.loads(line) for line in (DATA / "grader.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", given_cases(), ids=lambda case: case["case"])
def test_given_cases(case, pool):
    assert verify(case["gold"], case["completion"], pool=pool).status == case["expect"]


# --- extraction


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}} then \boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed 8", "8"),
        (r"so $\boxed 8.$", "8"),
        (r"\fbox{8}", "8"),
        (r"\boxed {8}", "8"),
        (r"\boxed{\boxed{8}}", "8"),
        (r"\boxed{\frac{\boxed{1}}{2}}", r"\frac{{1}}{2}"),
        (r"\boxed{8 and \boxed{9}", "9"),
        (r"\boxed{\{2,9\}}", r"\{2,9\}"),
        (r"\boxed{8} hmm no, so \boxed{9", None),
        (r"8 then \boxed{}", None),
        (r"\boxed{8} then \boxed{ }", None),
        (r"\boxed{8} then \boxed", None),
        (r"The answer is 8.", None),
        (r"<think>\boxed{3}</think> \boxed{8}", "8"),
        (r"<think>\boxed{8}</think> I do not know", None),
        (r"<think>\boxed{8}", None),
        (r"\boxed{3}</think>\boxed{8}<think>\boxed{4}", "8"),
        (r"\boxedx{8}", None),
        (r"<answer>\(\boxed{70}\).</answer>", "70"),
    ],
)
def test_the_last_box_decides(text, content):
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("She pays $1,234.50 in all.", "1,234.50"),
        ("Final Answer: **73**", "73"),
        ("5-3", "3"),
        ("it is -3", "-3"),
        ("3/4 of it", "3/4"),
        ("10,20", "20"),
        ("answer: ٤٢", "42"),
        ("<think>5</think> so 6", "6"),
        ("no number", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_statuses():
    assert verify("8", "no box").status == "no_answer"
    assert verify("8", "no box", finish_reason="length").status == "truncated"
    assert verify("8", r"\boxed{8", finish_reason="length").status == "truncated"
    assert verify("8", r"\boxed{8} and then", finish_reason="length").status == "correct"
    assert verify("8", "so 8", extractor="last_number", finish_reason="length").status == "truncated"
    assert verify("8", "so 8", extractor="last_number", finish_reason="stop").status == "correct"
    assert verify("8", r"\boxed{9}").reward == 0 and verify("8", r"\boxed{8}").reward == 1
    with pytest.raises(ValueError, match="boxed, last_number"):
        verify("8", "8", extractor="any")


@pytest.mark.parametrize("completion", [None, b"\\boxed{8}", 8, ["8"]])
def test_what_is_not_text_is_counted_not_raised(completion):
    assert verify("8", completion).status == "error"


# --- the written policies and the public reports

REPORTS = [  # report, gold, answer in the box, verdict
    ("huggingface/Math-Verify#1", r"\frac{7}{9}", "7/9", True),
    ("huggingface/Math-Verify#56", "(2,9)", "(2,9)", True),
    ("huggingface/Math-Verify#56", r"\sqrt{5}", r"\sqrt 5", True),
    ("huggingface/Math-Verify#2", r"\frac{2}{3}", "0.67", False),
    ("huggingface/Math-Verify#2", r"\frac{3}{8}", "0.375", True),
    ("huggingface/Math-Verify#2", r"\sqrt{51}", "7.141428", False),
    ("huggingface/Math-Verify#14", r"\frac{1}{2^{80}}", r"\frac{1}{2^{81}}", False),
    ("huggingface/Math-Verify#14", r"\frac{\pi}{2^{80}}", r"\frac{\pi}{2^{81}}", False),
    ("huggingface/Math-Verify#14", "y=2x+1", "y=2x+2", False),
    ("huggingface/Math-Verify#14", "3:15", "4:15", False),
    ("huggingface/Math-Verify#14", r"1 \pm \sqrt{19}", r"1+\sqrt{19}", False),
    ("huggingface/Math-Verify#10", "(1,4)", "1<x<4", True),
    ("huggingface/Math-Verify#10", "1<x<4", "(1,4)", True),
    ("huggingface/Math-Verify#10", r"(-\infty,2)", "x<2", True),
    ("huggingface/Math-Verify#10", r"x \in [-2,7]", r"-2 \le x \le 7", True),
    ("huggingface/Math-Verify#10", r"x \in [-2,7]", "[-2,7]", True),
    ("huggingface/Math-Verify#10", "(1,4)", r"1<x\le 4", False),
    ("huggingface/Math-Verify#10", r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3", True),
    ("huggingface/Math-Verify#47", "2,9", "2", False),
    ("huggingface/Math-Verify#47", "2,9", "2,9,11", False),
    ("huggingface/Math-Verify#47", "2,9", "9, 2", True),
    ("huggingface/Math-Verify#47", "7 and 13", "13", False),
    ("huggingface/Math-Verify#47", "7 and 13", "13, 7", True),
    ("huggingface/Math-Verify#61", "30", r"30\%", True),
    ("huggingface/Math-Verify#61", r"30\%", "30", True),
    ("huggingface/Math-Verify#61", r"30\%", "0.3", True),
    ("huggingface/Math-Verify#61", "0.3", r"30\%", True),
    ("huggingface/Math-Verify#61", "30", "0.3", False),
    ("huggingface/Math-Verify#61", r"30\%", r"31\%", False),
    ("huggingface/Math-Verify#61", r"30\%", r"30 \text{ percent}", True),
    ("huggingface/Math-Verify#40", r"\frac{x^2}{4}+\frac{y^2}{3}=1", r"\frac{x^2}{16}+\frac{y^2}{12}=1", False),
    ("huggingface/Math-Verify#60", "3x-y+13=0", "3x+4y+14=0", False),
    ("huggingface/Math-Verify#60", "5x-2y+1=0", "5x+7y+9=0", False),
    ("huggingface/Math-Verify#60", "5x-2y+1=0", "0", False),
    ("huggingface/Math-Verify#75", "x+C", "x+K", False),
    ("huggingface/Math-Verify#26", "y=2x+1", "2x-y+1=0", True),
    ("huggingface/Math-Verify#26", "y=2x+3", "2x+3", True),
    ("huggingface/Math-Verify#26", "5", "x=5", True),
    ("huggingface/Math-Verify#26", "x=5", "5", True),
    ("huggingface/Math-Verify#26", "x=5", "y=5", False),
    ("huggingface/Math-Verify#26", "8", "7=8", False),
    ("EleutherAI/lm-evaluation-harness#4030", "[2,5)", "[2,5)", True),
    ("EleutherAI/lm-evaluation-harness#4030", "[2,5)", "(2,5)", False),
    ("EleutherAI/lm-evaluation-harness#4031", "(1,2)", r"\left(1,2\right)", True),
    ("EleutherAI/lm-evaluation-harness#4031", r"\infty", r"\infty", True),
    ("EleutherAI/lm-evaluation-harness#4031", "12", "12 ft", True),
    ("EleutherAI/lm-evaluation-harness#4031", r"\frac{270}7\text{ degrees}", r"\frac{270}{7}^\circ", True),
    ("EleutherAI/lm-evaluation-harness#4031", r"864 \mbox{ inches}^2", "864", True),
    ("aisa-group/PostTrainBench#44", "11", "711", False),
    ("aisa-group/PostTrainBench#44", "49", "149", False),
    ("NVIDIA-NeMo/Gym#1844", r"\text{(C)}", r"\text{C}", True),
    ("NVIDIA-NeMo/Gym#1844", r"\text{(C)}", "C) twelve", True),
    ("NVIDIA-NeMo/Gym#1844", r"\text{(C)}", r"\textbf{(C)}\ 7", True),
    ("NVIDIA-NeMo/Gym#1844", r"\text{(C)}", "D) twelve", False),
    ("NVIDIA-NeMo/Gym#1844", r"\text{east}", "East", True),
    ("NVIDIA-NeMo/Gym#1844", r"\text{east}", r"\text{west}", False),
    ("Liuziyu77/Visual-RFT#79", "8", "1,2,3,4,5,6,7,8,9", False),
    ("hedyorg/hedy#2943", "42", "٤٢", True),
    ("hedyorg/hedy#2943", "42", "４２", True),
    ("hedyorg/hedy#2943", "42", "४२", True),
    ("hedyorg/hedy#2943", "x^2", "x²", True),
    ("hedyorg/hedy#2943", "52_8", "52₈", True),
    ("hedyorg/hedy#2943", r"\frac{5}{2}", "2½", True),
    ("hedyorg/hedy#2943", r"2\sqrt{3}", "2√3", True),
    ("huggingface/Math-Verify#76", "73", "**73**", True),
    ("written policy", "58500", r"58\,500", True),
    ("written policy", "58500", "58\u2009500", True),
    ("written policy", r"11,\! 111,\! 111,\! 100", "11111111100", True),
    ("written policy", r"\$32,\!348", "32348", True),
    ("written policy", "2516_8", "2516", False),
    ("written policy", "2516_8", r"2516_{\text{eight}}", True),
    ("written policy", "2516_8", "2516_9", False),
    ("written policy", "42", "42_{10}", True),
    ("written policy", "1,-2", r"\{-2,1\}", True),
    ("written policy", r"\{1\pm\sqrt{5},-2\}", r"-2, 1-\sqrt5, 1+\sqrt5", True),
    ("written policy", "3, 5, 7", "(3,5,7)", False),
    ("written policy", r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", True),
    ("written policy", "(2,9)", "(9,2)", False),
    ("written policy", r"\begin{pmatrix}-1/3 \\ 2/3 \end{pmatrix}", r"\begin{bmatrix}-\frac13\\2/3\end{bmatrix}", True),
    ("written policy", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", False),
    ("written policy", r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", True),
    ("written policy", r"\frac{11+9a}{20}", r"\frac{9a}{20}+\frac{11}{20}", True),
    ("written policy", r"\cot x", r"\frac{\cos x}{\sin x}", True),
    ("written policy", r"\cot x", r"\tan x", False),
    ("written policy", r"1\frac{4}{5}", "1.8", True),
    ("written policy", "8", r"\text{eight}", False),
    ("written policy", "6+9i", "9 i + 6", True),
    ("written policy", "2i", r"\frac{-2}{i}", True),
    ("written policy", "1+274i", "274 + i", False),
    ("written policy", ".0000672", r"6.72 \cdot 10^{-5}", True),
    ("written policy", r"\dfrac{2469}{20,\!000}", r"\frac{2469}{20000}", True),
    ("written policy", r"\frac{1}{29,322,216}", "1/29322216", True),
    ("written policy", r"\approx 8.24 \text{ mph}", "8.24", True),
    ("written policy", "1/2004!", "1/2004!", True),
    ("written policy", r"\text{(C)}", "c", True),
    ("written policy", r"\text{A,B}", "B, A", True),
    ("written policy", r"\text{A,B}", "A", False),
    ("written policy", "3:2", r"\frac{3}{2}", True),
    ("written policy", r"\frac{3}{2}", "3:2", False),
    ("written policy", "3R^2", "3r^2", False),
    ("written policy", "5r^5", "5 r^{5}", True),
    ("written policy", "2", "2 xy", False),
    ("written policy", "12", "12 square feet", True),
    ("written policy", "a + b + c", "c+a+b", True),
    ("written policy", "2i", "(1+i)^2", True),
    ("written policy", r"\sin^2 t", r"1-\cos^2 t", True),
    ("written policy", r"\sin^2 t", r"\sin^2 s", False),
    ("written policy", r"\frac \pi4 - \sqrt2", r"\frac{\pi-4\sqrt{2}}{4}", True),
    ("written policy", "3.15", r"\pi", False),
]  # fmt: skip


@pytest.mark.parametrize(("report", "gold", "answer", "equal"), REPORTS)
def test_reports_and_policies(report, gold, answer, equal, pool):
    assert status(gold, answer, pool) == ("correct" if equal else "wrong")


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("045", "45", "correct"),
        ("45", "045", "correct"),
        ("45", "45.0", "correct"),
        ("45", r"\text{45}", "correct"),
        ("45", r"45^\circ", "correct"),
        ("45", "m+n=45", "correct"),
        ("033", "33", "correct"),
        ("45", "1045", "wrong"),
        ("45", "45.5", "wrong"),
        ("45", "-45", "wrong"),
        ("45", r"45\%", "wrong"),
        ("11", "711", "wrong"),
        ("45", r"44, 45", "wrong"),
        ("45", "x", "wrong"),
    ],
)
def test_aime_compares_integers(gold, answer, expected):
    assert status(gold, answer, kind="integer") == expected


def test_end_to_end_canaries():
    """Five right replies in the shape that an extractor once spoiled (skylight-org/skylight-research#34)."""
    for number in (70, 0, 999, 123, 8):
        assert verify(str(number), rf"<answer>It is \(\boxed{{{number}}}\).</answer>").status == "correct"
    assert verify("42", r"Thus \[ \boxed{42} \]").status == "correct"


def test_the_prompt_earns_nothing():
    """Only the response is an argument; a prompt that shows a box cannot be graded by accident."""
    assert verify("8", "").status == "no_answer"


# --- numbers

integers = st.integers(-(10**30), 10**30)
fractions = st.builds(Fraction, integers, st.integers(1, 10**12))


@given(fractions)
def test_exact_reads_every_spelling_of_a_fraction(value):
    p, q = value.numerator, value.denominator
    sign, magnitude = ("-" if p < 0 else ""), abs(p)
    for text in (f"{p}/{q}", rf"\frac{{{p}}}{{{q}}}", rf"{sign}\frac{{{magnitude}}}{{{q}}}", f"({p})/({q})"):
        assert exact(text) == value
    whole, rest = divmod(magnitude, q)
    if whole and rest:
        assert exact(rf"{sign}{whole}\frac{{{rest}}}{{{q}}}") == value
        assert exact(f"{sign}{whole} {rest}/{q}") == value


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=6))
def test_exact_reads_decimals_without_rounding(value):
    assert exact(f"{value:f}") == Fraction(value)
    assert exact(f"{value:e}") == Fraction(value)


@given(fractions, fractions)
def test_equal_only_when_equal(first, second):
    verdict = status(f"{first.numerator}/{first.denominator}", rf"\frac{{{second.numerator}}}{{{second.denominator}}}")
    assert verdict == ("correct" if first == second else "wrong")


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(1, 20))
def test_differ_never_calls_equal_forms_different(a, b, c):
    assert not differ(f"(x+({a}))(x+({b}))", f"x^2+({a + b})x+({a * b})")
    assert not differ(rf"\frac{{{a}}}{{\sqrt{{{c}}}}}", rf"\frac{{{a}\sqrt{{{c}}}}}{{{c}}}")
    assert differ(rf"\pi+{c}", r"\pi")


@settings(max_examples=300)
@given(st.text(alphabet="0123456789abxX\\{}()[]$%,. _^/+-=<>½²₈−π√٤\u2009 frac", max_size=40))
def test_normalise_is_idempotent(text):
    """openai/prm800k#19: a normaliser that trips on its own output."""
    once = normalise(text)
    assert normalise(once) == once and compact(compact(once)) == compact(once)


def test_cost_gates_need_no_evaluation():
    """A length limit lets a short bomb through; the gate is on the value's bits."""
    started = time.process_time()
    for bomb in (r"9^{9^{9^9}}", "10^9!", "2^{2^{40}}", "99999999!"):
        with pytest.raises(TooCostly):
            exact(bomb)
        assert status("8", bomb) == "timeout"
        assert status(bomb, bomb) == "correct"
    assert time.process_time() - started < 0.5


# --- golds


def test_bad_golds_are_refused_with_their_row(pool):
    form_feed = chr(12) + "rac{1}{4}"
    for gold, reason in [
        (form_feed, "control character"),
        ("", "empty"),
        (None, "empty"),
        ("7*sin(pi*x/5)+1", "program syntax"),
        (r"\frac{1}{", "parse"),
        ("1" * 600, "600 characters"),
    ]:
        with pytest.raises(ValueError, match="gold_unparsable: 1 of 5.*row 3") as error:
            golds = [("row 1", "1"), ("row 2", r"\sqrt{2}"), ("row 3", gold), ("row 4", "x=5"), ("row 5", "[1,2)")]
            self_check(golds, Rule(), pool)
        assert reason in str(error.value)
    assert gold_problem(r"\frac{1}{4}") == ""


def test_aime_golds_must_be_integers(pool):
    assert self_check([("a", "045"), ("b", "999")], RULES["aime_2024"], pool) == 2
    with pytest.raises(ValueError, match="1000.*0 to 999"):
        self_check([("a", "1000")], RULES["aime_2024"], pool)


def test_canaries_guard_the_grader(pool, monkeypatch):
    monkeypatch.setattr(verify_module, "CANARIES", [("30", "31", True)])
    with pytest.raises(ValueError, match=f"self-test.*math-verify {MATH_VERIFY}"):
        self_check([("a", "1")], Rule(), pool)


@pytest.mark.data
def test_every_gold_equals_itself(data_dir, pool):
    rows = [json.loads(line) for line in (data_dir / "math_500.jsonl").read_text().splitlines()]
    assert self_check([(row["unique_id"], row["answer"]) for row in rows], RULES["math_500"], pool) == 500
    verdicts = verify_many([(row["answer"], row["solution"], "stop") for row in rows], RULES["math_500"], pool)
    assert {verdict.status for verdict in verdicts} == {"correct"}


@pytest.mark.data
def test_sympys_other_spellings_of_golds_are_accepted(data_dir, pool):
    """Golds parsed, expanded, factored and printed by sympy: 300 equal forms nobody wrote by hand."""
    import sympy
    from math_verify import LatexExtractionConfig, parse

    pairs = []
    for line in (data_dir / "math_500.jsonl").read_text().splitlines():
        gold = json.loads(line)["answer"]
        if "_" in gold or gold.lstrip("-").isdigit() or any(char.isupper() for char in gold):
            continue
        parsed = parse(f"${gold}$", [LatexExtractionConfig()], parsing_timeout=None)
        if parsed and isinstance(parsed[0], sympy.Expr):
            value = parsed[0].doit()
            pairs += [(gold, sympy.latex(form(value))) for form in (sympy.expand, sympy.factor, sympy.together)]
    assert len(pairs) > 250
    assert [(gold, form) for gold, form in pairs if status(gold, form, pool) != "correct"] == []


@pytest.mark.data
def test_normalise_is_idempotent_on_golds(data_dir):
    for name in ("math_500", "math_train"):
        for line in (data_dir / f"{name}.jsonl").read_text().splitlines():
            once = normalise(json.loads(line)["answer"])
            assert normalise(once) == once


# --- speed, in CPU seconds


def test_a_thousand_simple_answers_in_a_second():
    rng, pairs = random.Random(0), []
    for _ in range(2_000):
        a, b = rng.randrange(-9_999, 9_999), rng.randrange(1, 999)
        pairs += [(str(a), str(a + rng.randrange(2))), (rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}"), (f"{a}.5", f"{a}.50")]
        pairs.append((rf"\text{{word}} x^{{{b}}}", rf"\text{{word}} x^{{{b}}}"))
    started = time.process_time()
    verdicts = [verify(gold, rf"text \boxed{{{answer}}}") for gold, answer in pairs]
    rate = len(pairs) / (time.process_time() - started)
    assert all(verdict.detail == "rules" for verdict in verdicts)
    assert rate > 1_000, f"{rate:.0f} answers a second"


@pytest.mark.data
def test_a_hundred_mixed_pairs_in_a_second(data_dir):
    rows = [json.loads(line)["answer"] for line in (data_dir / "math_500.jsonl").read_text().splitlines()]
    hard = [gold for gold in rows if not gold.lstrip("-").isdigit()]
    rng = random.Random(0)
    pairs = [(gold, rng.choice(hard)) for gold in hard] + [(gold, f"{gold} + 0") for gold in hard]
    pool = Pool(1)
    pool.check("1", "1")
    before = cpu_s()
    for gold, answer in pairs:
        status(gold, answer, pool)
    pool.close()
    rate = len(pairs) / (cpu_s() - before)
    assert rate > 100, f"{rate:.0f} pairs a CPU second, the process start included"


# --- limits


def test_bombs_do_not_eat_the_pool():
    """areal-project/AReaL#1426: six bombs and twenty good answers on two slots."""
    pool = Pool(2, cpu_limit_s=0.6)
    work = [("8", bomb) for bomb in BOMBS] + [(r"\cot x", r"\frac{\cos x}{\sin x}")] * 20
    random.Random(1).shuffle(work)
    with ThreadPoolExecutor(8) as executor:
        results = list(executor.map(lambda pair: (pair[0], status(*pair, pool)), work))
    assert [found for gold, found in results if gold != "8"] == ["correct"] * 20
    assert {found for gold, found in results if gold == "8"} <= {"timeout", "wrong", "error"}
    assert pool.slots.qsize() == pool.size == 2
    assert status(r"\cot x", r"\frac{\cos x}{\sin x}", pool) == "correct"
    pool.close()


def test_a_worker_over_its_cpu_limit_is_killed_and_replaced():
    pool = Pool(1, cpu_limit_s=0.3)
    assert pool.check("x^{2}", r"\sum_{n=1}^{10000000} \frac{n^n}{n+1}") == {
        "status": "timeout",
        "detail": "CPU time limit",
    }
    assert pool.check("x^{2}", "x^2")["status"] == "correct"
    pool.close()


def test_a_worker_over_its_memory_limit_is_an_error():
    pool = Pool(1, cpu_limit_s=5.0, memory_limit=1 << 20)
    assert pool.check("x", "1" * 50_000_000)["status"] == "error"
    pool.close()


def test_another_math_verify_is_refused(monkeypatch):
    monkeypatch.setattr("jetrl_bench.verify_pool.MATH_VERIFY", "0.8.0")
    pool = Pool(1)
    with pytest.raises(ValueError, match="scores are defined with 0.8.0"):
        pool.check("x", "x")
    pool.close()


def test_threads_asyncio_and_foreign_alarms(pool):
    """Math-Verify#50, verl#1331, compose-rl#38: no alarm of ours, none disturbed."""
    pair = (r"\cot x", r"\frac{\cos x}{\sin x}")
    found = []
    threads = [threading.Thread(target=lambda: found.append(status(*pair, pool))) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

    async def gather():
        return await asyncio.gather(*(asyncio.to_thread(status, *pair, pool) for _ in range(4)))

    assert found + asyncio.run(gather()) == ["correct"] * 8
    fired = []
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        deadline = time.monotonic() + 5
        while not fired and time.monotonic() < deadline:
            assert status(*pair, pool) == "correct"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert fired == [1]


def test_in_a_subprocess_with_a_thread(tmp_path):
    code = (
        "import threading\nfrom jetrl_bench.verify import verify\n"
        r"t = threading.Thread(target=lambda: print(verify('\\cot x', '\\boxed{\\frac{\\cos x}{\\sin x}}').status))"
        "\nt.start(); t.join()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    assert (done.returncode, done.stdout) == (0, "correct\n")


def _fuzz(rng):
    alphabet = ["{", "}", "[", "]", "(", ")", "\\", "$", "^", "_", ",", "=", "<", "%", "&", "|", "!", " ", "\n", "\0"]
    alphabet += list("0123456789xyeiπ√½²₈∞∪±٤४４\u200b\ud800\U0001f600ﷺ") + [r"\frac", r"\sqrt", r"\text{", r"\boxed{"]
    alphabet += [
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        r"\cup",
        r"\pm",
        r"\infty",
        r"\left(",
        "</think>",
        "<think>",
        "9^9",
    ]
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40)))


def test_ten_thousand_fuzzed_strings(pool):
    rng, golds = random.Random(5), ["8", r"\frac{1}{2}", "(2,9)", r"\sqrt{5}", "x^2+1", r"\text{east}", "52_8", "[1,2)"]
    pairs = []
    for number in range(9_990):
        text = _fuzz(rng)
        pairs.append((golds[number % len(golds)], text if number % 3 else rf"\boxed{{{text}}}", "stop"))
    for text in ("{" * 200_000, r"\boxed{" * 30_000, r"\boxed{" + "1+" * 100_000 + "1}", "9" * 200_000, "(" * 200_000):
        pairs += [("8", text, "length"), (r"\sqrt{5}", rf"\boxed{{{text}}}", "stop")]
    verdicts = verify_many(pairs, Rule(), pool)
    assert len(verdicts) == 10_000
    counts = {name: sum(verdict.status == name for verdict in verdicts) for name in ("correct", "error", "timeout")}
    assert counts["correct"] < 30 and counts["error"] < 30 and counts["timeout"] < 30
    assert pool.slots.qsize() == pool.size
    assert status(r"\sqrt{12}", r"2\sqrt{3}", pool) == "correct"


# --- command line


def _run(path, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    verify_module.add_arguments(parser)
    code = verify_module.run(parser.parse_args([str(path)]))
    return code, capsys.readouterr().out


def test_command_line(tmp_path, capsys):
    code, out = _run(DATA / "grader.jsonl", capsys)
    assert (code, out) == (0, "58 passed, 0 failed\n")
    code, out = _run(DATA / "grader_forms.jsonl", capsys)
    assert (code, out.splitlines()[-1]) == (0, "237 passed, 0 failed"), out
    path = tmp_path / "cases.jsonl"
    rows = [
        {"gold": "8", "completion": r"\boxed{9}", "expect": "correct"},
        {"gold": "045", "completion": r"\boxed{45}", "expect": "correct", "task": "aime_2024"},
        {"gold": "8", "completion": "so 8", "expect": "correct", "task": "gsm8k"},
        {"gold": "8", "completion": "so", "expect": "truncated", "finish_reason": "length"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out = _run(path, capsys)
    assert code == 1
    assert out.splitlines()[-1] == "3 passed, 1 failed"
    assert "cases.jsonl:1" in out and "expected correct, got wrong" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "gold, completion and expect"),
        ("[1]", "gold, completion and expect"),
        ("not json", "cases.jsonl:1"),
        ('{"gold": "1", "completion": "1", "expect": "right"}', "use one of correct"),
        ('{"gold": "1", "completion": "1", "expect": "wrong", "task": "aime24"}', "use one of aime_2024"),
    ],
)
def test_bad_case_files_are_named(tmp_path, capsys, line, message):
    path = tmp_path / "cases.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        _run(path, capsys)
    with pytest.raises(ValueError, match="No such file"):
        _run(tmp_path / "missing.jsonl", capsys)


def test_golds_are_checked_once_and_again_when_one_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []
    monkeypatch.setattr(verify_module, "self_check", lambda problems, rule: seen.append((tuple(problems), rule)) or 2)
    golds, rule = [("a", "1"), ("b", "2")], RULES["aime_2024"]
    for _ in range(2):
        assert verify_module.self_check_once(golds, rule) == 2
    assert len(seen) == 1
    verify_module.self_check_once([("a", "1"), ("b", "3")], rule)
    verify_module.self_check_once(golds, RULES["math_500"])
    monkeypatch.setattr(verify_module, "REVISION", verify_module.REVISION + 1)
    verify_module.self_check_once(golds, rule)
    assert len(seen) == 4


def test_a_failed_check_of_golds_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        with pytest.raises(ValueError, match="1000"):
            verify_module.self_check_once([("a", "1000")], RULES["aime_2024"])
