"""Is a reply's final answer the gold answer? The written rules of every mathematics task here.

`normalise` maps one answer to plain ASCII LaTeX (NFKC, digits of every script, spacing and style commands dropped);
`compare` takes gold and answer apart (number bases, words, percent, units, lists, sets, tuples, intervals, unions,
inequalities, matrices, equations) down to leaves, decides numbers exactly, and hands what is left to `leaf`. In the
calling process `leaf` raises Undecided; in a worker process it is math-verify (verify_pool.py).

Policies, each a test:
- No rounding: an exact gold needs an exact answer (0.67 is not 2/3, 3.14 is not pi); 0.375 is 3/8.
- Percent: p% is p and p/100, so 30% = 30 = 0.3; two percentages compare as they stand.
- Units, degree signs, currency signs and an "x =" are not compared; a number base is: 2516 is not 2516_8.
- Lists, sets and +- are unordered and complete; (a, b) is ordered; bare 3,5,7 is not the tuple (3,5,7).
- (1,4) is also 1 < x < 4. A clock time or ratio a:b compares part by part; a fraction may stand for a gold ratio.
- Words compare without case; a choice answers by its label. "eight" is not 8.
- x + C is not x + K: families of solutions with other constant names are refused.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from jetrl_bench.verify_number import differ, exact
from jetrl_bench.verify_text import compact, normalise, split

MAX_ANSWER = 2_000
"""Characters; no gold comes near it, so a longer answer is wrong without being read."""


class Undecided(Exception):
    """The pair needs math-verify."""


Leaf = Callable[[str, str], bool]


def _enclosed(text: str) -> str:
    """The body of a bracket pair that spans the whole text, brackets included in a half-open sense: "(a,b]" is one."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return ""
    depth, at = 0, 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
            continue
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and at < len(text) - 1:
            return ""
        at += 1
    return text[1:-1].strip() if depth == 0 else ""


_LABEL = re.compile(r"\(?([A-Ja-j])\)?")
_CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])(?:\)|\.|:|$))", re.IGNORECASE)
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_REPEATING = re.compile(r"([-+]?)([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{\s*([0-9]+)\s*\}")
_SET_BUILDER = re.compile(r"\\\{\s*[A-Za-z]\s*(?::|\\mid(?![A-Za-z])|\|)\s*(.*)\\\}")
_WHOLE_TEXT = re.compile(r"\\text\{([^{}\\]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_BASE = re.compile(
    r"\(?\s*([0-9A-Fa-f][0-9A-Fa-f ,]*?)\s*\)?\s*(?:_\s*\{?\s*\(?(?:base )?(\w+)\)?\s*\}?|\s+\(?base (\w+)\)?)"
)
_BASE_WORDS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_BASE_NAMES = {word: base for base, word in enumerate(_BASE_WORDS, 2)}
_UNIT_GROUP = re.compile(r"\s*(?:/|\\cdot|\*)?\s*\\text\{[^{}]*[A-Za-z][^{}]*\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?\s*$")
_SHORT_UNITS = "ft|cm|mm|km|kg|mg|ml|lb|lbs|oz|yd|mi|hr|hrs|min|sec|mph|deg|sq|cu|per|day|in|am|pm"
_UNIT_WORD = rf"(?:{_SHORT_UNITS}|[A-Za-z]{{4,}})(?:[ /.](?![0-9])|$|(?=\^))"
_UNIT_WORDS = re.compile(rf"(?<=[0-9}})%])\s+(?:{_UNIT_WORD})+(?:\^\s*(?:\{{\s*\d\s*\}}|\d))?$")
_FUNCTIONS = {"pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "arcsin", "arccos", "arctan"}
_CONNECTIVE = re.compile(r"\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<=[\s,])(?:and|or)(?=\s)|\\(?:vee|lor)(?![A-Za-z]))\s*")
_ASSIGNED = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?)\s*(?:=|\\in(?![A-Za-z]))\s*")
_CONTAINED = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_INEQUALITY = re.compile(r"<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])")
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?|\\(?:theta|alpha|beta|lambda)")
_COLON = re.compile(r"(\d+)\s*:\s*(\d+)(?:\s*:\s*(\d+))?(?:\s*(?:\\text\{)?\s*([ap])\.?m\.?\s*\}?)?", re.IGNORECASE)
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.DOTALL)


def _words(text: str) -> str:
    """Plain words of an answer, case folded; empty where the answer is anything but words."""
    inner = re.sub(r"\\text\{([^{}\\]*)\}", r"\1", text).strip(" .")
    return " ".join(inner.casefold().split()) if _WORDS.fullmatch(inner) else ""


def _number_base(text: str) -> tuple[str, int] | None:
    match = _BASE.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r" \1", text).strip())
    name = (match[2] or match[3] or "").lower() if match else ""
    base = _BASE_NAMES.get(name, int(name) if name.isdecimal() and len(name) < 3 else 0)
    digits = match[1].replace(" ", "").replace(",", "").lstrip("0").upper() or "0" if match else ""
    return (digits, base) if 2 <= base <= 36 else None


def strip_units(text: str) -> tuple[str, bool]:
    """(value without currency, degrees and units, whether it was a percentage)."""
    text = re.sub(r"\s*\\text\{\s*(?:percent|per cent|pct)\s*\}\s*$|(?<=[0-9}])\s*percent$", "%", text.strip())
    while True:
        before = text
        text = text if _TRIGONOMETRIC.search(text) else re.sub(r"\s*\^\s*\\circ\s*$", "", text)
        shorter = _UNIT_GROUP.sub("", text)
        text = shorter if shorter.strip() else text
        match = _UNIT_WORDS.search(text)
        if match and not set(re.split(r"[ /^]+", match[0].strip())) & _FUNCTIONS:
            text = text[: match.start()]
        if text == before:
            break
    whole = re.fullmatch(r"\\text\{\s*([^{}\\]*[0-9][^{}\\]*?)\s*\}", text)
    if whole:
        return strip_units(whole[1])
    return (text[:-1].strip(), True) if text.endswith("%") else (text.strip(), False)


def exact_value(text: str) -> Fraction | None:
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    elif _GROUPED.fullmatch(text):
        text = text.replace(" ", "")
    repeating = _REPEATING.fullmatch(text) if len(text) < 100 else None
    if repeating:
        sign, whole, fixed, cycle = repeating.groups()
        value = Fraction(int(whole + fixed or "0") * (10 ** len(cycle) - 1) + int(cycle), 10 ** len(cycle) - 1)
        return value / 10 ** len(fixed) * (-1 if sign == "-" else 1)
    return exact(text)


_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")


def _expand_signs(text: str) -> list[str]:
    if not re.search(r"\\[pm]{2}(?![A-Za-z])", text):
        return [text]
    signs = (("+", "-"), ("-", "+"))
    return [re.sub(r"\\mp(?![A-Za-z])", n, re.sub(r"\\pm(?![A-Za-z])", p, text)) for p, n in signs]


def _members(text: str) -> list[str] | None:
    """Members of an unordered list, set or +- expression; None for anything else."""
    body, is_set = text, False
    if text.startswith(r"\{") and text.endswith(r"\}") and text.find(r"\}") == len(text) - 2:
        body, is_set = text[2:-2].strip(), True
    if not is_set and re.search(r",\s", body):
        body = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", body)
    parts = split(_CONNECTIVE.sub(",", body))
    parts = [member for part in parts if part for member in _expand_signs(part)]
    if len(parts) < 2 and not is_set:
        return None
    return list(dict.fromkeys(parts))


def _intervals(text: str) -> tuple[str, list[tuple[str, str, str, str]]] | None:
    r"""(variable, intervals) of "[a,b) \cup (c,d)", "a < x \le b", "x \in ..." or "x < a or x > b"; None otherwise."""
    name, found = "", []
    builder = _SET_BUILDER.fullmatch(text)
    text = builder[1].strip() if builder else text
    assigned = _ASSIGNED.match(text) if r"\in" in text else None
    if assigned:
        name, text = assigned[1], text[assigned.end() :]
    pieces = re.split(r"\s*\\cup(?![A-Za-z])\s*", text)
    if len(pieces) == 1 and _INEQUALITY.search(text):
        pieces = _CONNECTIVE.split(text)
    for piece in pieces:
        body = _enclosed(piece)
        ends = split(body) if body else []
        if len(ends) == 2:
            found.append((piece[0], ends[0], ends[1], piece[-1]))
            continue
        terms, relations = _INEQUALITY.split(piece), _INEQUALITY.findall(piece)
        terms = [term.strip() for term in terms]
        if relations and relations[0] in (">", r"\ge"):
            flip = {">": "<", r"\ge": r"\le"}
            terms, relations = terms[::-1], [flip.get(relation, "?") for relation in relations[::-1]]
        if len(terms) == 2:
            middle = 0 if _VARIABLE.fullmatch(terms[0]) else 1
            terms = [*terms, r"\infty"] if middle else [r"-\infty", *terms]
            relations = [*relations, "<"] if middle else ["<", *relations]
        if len(terms) != 3 or not _VARIABLE.fullmatch(terms[1]) or not set(relations) <= {"<", r"\le"}:
            return None
        if name and name != terms[1]:
            return None
        name = terms[1]
        found.append(
            ("[" if relations[0] == r"\le" else "(", terms[0], terms[2], "]" if relations[1] == r"\le" else ")")
        )
    return name, found


def _rows(text: str) -> list[list[str]] | None:
    body = _enclosed(text)
    text = body if body.startswith(r"\begin") else text
    match = _MATRIX.fullmatch(text)
    if not match or r"\begin" in match[2]:
        return None
    rows = [row.strip() for row in match[2].split(r"\\")]
    return [[cell.strip() for cell in row.split("&")] for row in rows if row]


def _pair_up(gold: list[str], answer: list[str], leaf: Leaf) -> bool:
    """A bijection of equal members, in any order."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for member in gold:
        found = next((other for other in left if compact(other) == compact(member)), None)
        found = found or next((other for other in left if compare(member, other, leaf)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def has_letters(text: str) -> bool:
    return bool(re.search(r"[A-Za-z]", re.sub(r"\\(?:[A-Za-z]+)", "", text))) or r"\theta" in text


def _scalar(gold: str, answer: str, leaf: Leaf) -> bool:
    """Numbers exactly, percent by the written rule; then anything known to differ; then the leaf."""
    (gold, gold_percent), (answer, answer_percent) = strip_units(gold), strip_units(answer)
    if not answer:
        return False
    if compact(gold) == compact(answer) and gold_percent == answer_percent:
        return True
    first, second = exact_value(gold), exact_value(answer)
    if first is not None and second is not None:
        if gold_percent and not answer_percent:
            return second in (first, first / 100)
        if answer_percent and not gold_percent:
            return first in (second, second / 100)
        return first == second
    clocks = _COLON.fullmatch(gold), _COLON.fullmatch(answer)
    if all(clocks):
        halves = [(clock[4] or "").lower() for clock in clocks]
        parts = [[int(part) for part in clock.groups()[:3] if part] for clock in clocks]
        return parts[0] == parts[1] and (halves[0] == halves[1] or "" in halves)
    if clocks[0] and second is not None and int(clocks[0][2]) and not clocks[0][3]:
        return second == Fraction(int(clocks[0][1]), int(clocks[0][2]))
    if any(clocks) or differ(gold, answer):
        return False
    return leaf(gold, answer)


def _equation(gold: str, answer: str, leaf: Leaf) -> bool | None:
    """Equations and assignments; None where neither side is one."""
    gold_sides, answer_sides = split(gold, "="), split(answer, "=")
    if len(gold_sides) == 1 and len(answer_sides) == 1 or len(_members(answer) or []) > 1:
        return None
    assigned = _ASSIGNED.match(gold), _ASSIGNED.match(answer)
    if len(gold_sides) == 1:
        values = [side for side in answer_sides[1:] if not has_letters(side)]
        if not has_letters(answer_sides[0]):
            values.insert(0, answer_sides[0])
        last = answer_sides[-1]
        same = all(value == last or compare(last, value, leaf) for value in values)
        return same and compare(gold, last, leaf)
    if len(answer_sides) == 1:
        return bool(assigned[0]) and len(gold_sides) == 2 and compare(gold_sides[1], answer, leaf)
    if all(assigned) and len(gold_sides) == len(answer_sides) == 2:
        if assigned[0][1] == assigned[1][1] and assigned[0][1] not in gold_sides[1] + answer_sides[1]:
            return compare(gold_sides[1], answer_sides[1], leaf)
        if not has_letters(gold_sides[1]) and not has_letters(answer_sides[1]):
            return False
    return leaf(gold, answer)


def compare(gold: str, answer: str, leaf: Leaf) -> bool:
    """Whether two normalised answers are the same, by the rules at the head of this file."""
    if compact(gold) == compact(answer):
        return True
    bases = _number_base(gold), _number_base(answer)
    if any(bases):
        if all(bases):
            return bases[0] == bases[1]
        base, other = (bases[0], answer) if bases[0] else (bases[1], gold)
        return base[1] == 10 and exact_value(other) == Fraction(base[0])
    if r"\text{" in gold:
        inner = re.sub(r"\\text\{([^{}]*)\}", r"\1", gold).strip(" .")
        label = _LABEL.fullmatch(inner)
        if label:
            reply = _CHOICE.match(re.sub(r"\\text\{([^{}]*)\}", r"\1 ", answer).strip())
            return bool(reply) and (reply[1] or reply[2]).upper() == label[1].upper()
        if _words(gold):
            return _words(gold) == _words(answer)
        whole = [_WHOLE_TEXT.fullmatch(side) for side in (gold, answer)]
        if whole[0]:
            return compare(whole[0][1].strip(), whole[1][1].strip() if whole[1] else answer, leaf)
    elif _words(gold) and len(gold) > 3 and _words(answer):
        return _words(gold) == _words(answer)
    contained = _CONTAINED.match(answer)
    if contained and r"\in" not in gold:
        return compare(gold, answer[contained.end() :], leaf)
    gold_spans, answer_spans = _intervals(gold), _intervals(answer)
    if gold_spans and answer_spans:
        names = {gold_spans[0], answer_spans[0]} - {""}
        return len(names) < 2 and _same_spans(gold_spans[1], answer_spans[1], leaf)
    equation = _equation(gold, answer, leaf)
    if equation is not None:
        return equation
    rows = _rows(gold), _rows(answer)
    if any(rows):
        if not all(rows) or [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
            return False
        cells = zip(sum(rows[0], []), sum(rows[1], []), strict=True)
        return all(compare(one, other, leaf) for one, other in cells)
    bodies = _enclosed(gold), _enclosed(answer)
    members = [split(body) if body else [] for body in bodies]
    tuples = [len(parts) > 1 for parts in members]
    if any(tuples):
        if not all(tuples) or len(members[0]) != len(members[1]) or gold[0] + gold[-1] != answer[0] + answer[-1]:
            return False
        return all(compare(one, other, leaf) for one, other in zip(*members, strict=True))
    if any(body and text[0] == "(" and text[-1] == ")" for body, text in zip(bodies, (gold, answer), strict=True)):
        return compare(bodies[0] or gold, bodies[1] or answer, leaf)
    lists = None if exact_value(strip_units(gold)[0]) is not None else _members(gold), _members(answer)
    if lists[0] is not None or (lists[1] is not None and exact_value(strip_units(answer)[0]) is None):
        single = [[text] if members is None else members for members, text in zip(lists, (gold, answer), strict=True)]
        return _pair_up(*single, leaf)
    return _scalar(gold, answer, leaf)


def _same_spans(gold: list, answer: list, leaf: Leaf) -> bool:
    left = list(answer)
    for opening, low, high, closing in gold:
        for other in left:
            if (opening, closing) == (other[0], other[3]):
                if compare(low, other[1], leaf) and compare(high, other[2], leaf):
                    left.remove(other)
                    break
        else:
            return False
    return not left


_FUNCTION_CALL = re.compile(r"(?<![\\A-Za-z])(?:sin|cos|tan|log|ln|exp|sqrt)\s*\(|\*\*")


def gold_problem(gold: object, leaf: Leaf | None = None) -> str:
    """Why a gold answer cannot be graded against, or "" where it can; golds are LaTeX without $.

    With `leaf` given (math-verify's gold-against-gold, in a worker) golds outside the exact rules are parsed too.
    """
    if not isinstance(gold, str) or not gold.strip():
        return "empty"
    if any(unicodedata.category(char) == "Cc" and char not in "\n\t" for char in gold):
        return "a control character (an unescaped backslash in the file?)"
    if len(gold) > MAX_ANSWER // 4:
        return f"{len(gold)} characters"
    if _FUNCTION_CALL.search(gold):
        return "program syntax; golds are LaTeX"
    text = normalise(gold)
    if not text:
        return "nothing left after normalisation"
    if leaf is None or _number_base(text) or _words(text) or exact_value(strip_units(text)[0]) is not None:
        return ""
    rows, spans, members, body = _rows(text), _intervals(text), _members(text), _enclosed(text)
    if rows:
        pieces = sum(rows, [])
    elif spans:
        pieces = [end for span in spans[1] for end in span[1:3]]
    elif members:
        pieces = members
    elif body:
        pieces = split(body)
    else:
        pieces = [strip_units(text)[0]] if "=" not in text else [text]
        if r"\text{(" in text:
            return ""
    for piece in pieces:
        piece = strip_units(piece)[0]
        known = exact_value(piece) is not None or _number_base(piece) or _COLON.fullmatch(piece)
        if not known and not leaf(piece, piece):
            return f"{piece!r} does not parse"
    return ""
