r"""One canonical ASCII spelling of an answer: Unicode, digits of every script, LaTeX spacing and style commands.

Nothing here knows what an answer means; see verify_math.py.
"""

import re
import unicodedata

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ",
    "∙": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
    "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ", "º": r"^\circ ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "′": "'", "∶": ":", "⁄": "/", "∕": "/",
}  # fmt: skip
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\u00ad]")


def to_ascii(text: str) -> str:
    """NFKC, after what NFKC would flatten (x² to x2, 52₈ to 528, 2½ to 21/2) and with every script's digits as 0-9."""
    text = _INVISIBLE.sub("", text)
    text = re.sub(f"[{''.join(_SUPERSCRIPTS)}]+", lambda m: "^{" + "".join(_SUPERSCRIPTS[c] for c in m[0]) + "}", text)
    text = re.sub(f"[{''.join(_SUBSCRIPTS)}]+", lambda m: "_{" + "".join(_SUBSCRIPTS[c] for c in m[0]) + "}", text)
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text).replace("√", r"\sqrt ")
    text = _VULGAR.sub(lambda m: " " + unicodedata.normalize("NFKC", m[0]), text)
    text = unicodedata.normalize("NFKC", text.translate(_TRANSLATION))
    text = "".join(str(unicodedata.decimal(c)) if not c.isascii() and c.isdecimal() else c for c in text)
    return text.translate(_TRANSLATION)


_TRANSLATION = {ord(char): latex for char, latex in _SYMBOLS.items()}
_THIN_GROUPS = re.compile(r"(?<=[0-9])\s*(?:\\[,!;:> ]|~)\s*(?=[0-9]{3}(?![0-9]))")
_COMMA_GROUPS = re.compile(r"(?<=[0-9])(?:\{,\}|,\s*\\!)\s*(?=[0-9]{3})")
_DROPPED = re.compile(
    r"(\\\\)|(\\[{}])|\\\$|\$|\\[()\[\]]|\\[!,;:> ]|~|"
    r"\\(?:quad|qquad|displaystyle|textstyle|limits|thinspace|medspace|left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?"
)
_STYLES = re.compile(r"\\(?:mathbf|boldsymbol|bm|bold|mathit|mathsf|mathnormal|underline)\s*(?=\{)")
_TEXT = r"\\(?:mbox|hbox|textrm|textbf|textit|textnormal|textsf|texttt|text|mathrm|operatorname)\s*\{"
_RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (_TEXT, r"\\text{"),
        (r"\\(?:leq|leqslant|le)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant|ge)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\neq(?![A-Za-z])", r"\\ne "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\\{\s*\\\}", r"\\emptyset"),
        (r"\\text\{\s*([ie])\s*\}", r" \1 "),
        (r"^\s*\\text\{[^{}]*(?::|\bis)\s*\}\s*(?=[^\s])", ""),
        (r"\\%", "%"),
        (r"\\(?:degree|textdegree)(?![A-Za-z])", r"^\\circ"),
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
        (r"\\(?:approx|simeq)(?![A-Za-z])", " "),
        (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|-)", " "),
        (r"(?<=\{)([0-9]{1,3}(?:,[0-9]{3})+)(?=\})", lambda match: match[1].replace(",", "")),
        (r"\s+", " "),
    ]
]


def normalise(text: str) -> str:
    """One canonical ASCII spelling of an answer; idempotent. Structure and order are left as they are."""
    text = to_ascii(text)
    text = _COMMA_GROUPS.sub("", _THIN_GROUPS.sub("", text))
    text = _DROPPED.sub(lambda match: match[1] or match[2] or (" " if match[0][-1] not in "$()[]!" else ""), text)
    text = _STYLES.sub("", text)
    for pattern, replacement in _RENAMES:
        text = pattern.sub(replacement, text)
    if text.startswith("**") and text.endswith("**"):
        text = text.strip("*")
    return text.strip(" ,;").rstrip(" .,;")


def compact(text: str) -> str:
    """`normalise` without spaces that carry no meaning: equal compact forms are the same answer."""
    text = re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])", "\\1\0", text) if "\\" in text else text
    text = re.sub(r"(?<=[0-9A-Za-z]) (?=[0-9A-Za-z])", "\0", text)
    return text.replace(" ", "").replace("\0", " ")


def split(text: str, separator: str = ",") -> list[str]:
    """Split at a one-character separator outside every bracket."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            depth += {"{": 1, "}": -1}.get(text[at + 1 : at + 2], 0)
            at += 2
            continue
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == separator and depth <= 0:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [part.strip() for part in [*parts, text[start:]]]


def _token_end(text: str, at: int) -> int:
    """Where the TeX argument that starts at `at` ends: a group, a command or one character; -1 where there is none."""
    if at >= len(text):
        return -1
    if text[at] == "\\":
        match = re.compile(r"\\(?:[A-Za-z]+|.)").match(text, at)
        return match.end() if match else -1
    if text[at] != "{":
        return at + 1
    depth = 0
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += (text[at] == "{") - (text[at] == "}")
        at += 1
        if depth == 0:
            return at
    return -1


def brace_arguments(text: str) -> str:
    r"""\frac12 as \frac{1}{2}, \sqrt2 as \sqrt{2}: the arguments TeX would read, in braces."""
    out, at = [], 0
    for match in re.finditer(r"\\(frac|sqrt)(?![A-Za-z])\s*(\[[^\[\]]*\])?", text):
        if match.start() < at:
            continue
        out.append(text[at : match.start()] + match[0].rstrip())
        at = match.end()
        for _ in range(2 if match[1] == "frac" else 1):
            start = at + len(text[at:]) - len(text[at:].lstrip())
            end = _token_end(text, start)
            if end < 0:
                break
            body = text[start + 1 : end - 1] if text[start] == "{" else text[start:end]
            out.append("{" + brace_arguments(body) + "}")
            at = end
    return "".join(out) + text[at:]
