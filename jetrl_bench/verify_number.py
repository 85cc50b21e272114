"""Exact numbers and cheap numeric probes of LaTeX answers, without sympy.

`exact` decides what a grader meets most: integers, fractions, decimals, mixed numbers, scientific notation and any
arithmetic on them, as a Fraction. Comparing Fractions has no tolerance, so 1/2^80 is not 1/2^81 and 0.333 is not 1/3.
`differ` shows that two closed forms with roots, pi, i and letters are not equal by evaluating both at fixed points: it
may answer "different" or "cannot tell", never "equal".

Both are bounded in time and memory whatever the text: a parse depth, a text length, and a limit on the bits of a power
(`TooCostly`: 9^{9^{9}} is refused before it is computed).
"""

import cmath
import math
import re
from fractions import Fraction

MAX_CHARS = 400
MAX_DEPTH = 40
MAX_BITS = 20_000
MAX_FACTORIAL = 3_000


class TooCostly(ArithmeticError):
    """A power or factorial beyond the limits."""


class Unreadable(ValueError):
    """Not in the grammar, or ambiguous: nothing is known about the value."""


_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+", re.ASCII)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))[eE]([-+]?\d{1,6})", re.ASCII)
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)\s*/\s*(\d+)", re.ASCII)
_PLAIN = re.compile(r"[-+]?\d+", re.ASCII)


class _Parser:
    """Recursive descent from normalised LaTeX to nested tuples: ("n", Fraction), ("v", name), (operator, operands)."""

    def __init__(self, text: str):
        if len(text) > MAX_CHARS:
            raise Unreadable("too long")
        self.text, self.at, self.depth = text, 0, 0

    def parse(self):
        tree = self.sum()
        if self.peek():
            raise Unreadable(self.text[self.at :])
        return tree

    def peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at] if self.at < len(self.text) else ""

    def command(self) -> str:
        match = _COMMAND.match(self.text, self.at) if self.peek() == "\\" else None
        return match[0] if match else ""

    def expect(self, char: str) -> None:
        if self.peek() != char:
            raise Unreadable(f"no {char}")
        self.at += 1

    def sum(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        tree = self.term()
        while self.peek() in ("+", "-"):
            sign = self.text[self.at]
            self.at += 1
            right = self.term()
            tree = ("+", tree, right if sign == "+" else ("-", right))
        self.depth -= 1
        return tree

    def term(self):
        sign = False
        while self.peek() in ("+", "-"):
            sign ^= self.text[self.at] == "-"
            self.at += 1
        tree, divided = self.power(), False
        while True:
            char, command = self.peek(), self.command()
            if char == "*" or command in ("\\cdot", "\\times"):
                self.at += len(command) or 1
                tree, divided = ("*", tree, self.signed_power()), False
            elif char == "/" or command == "\\div":
                self.at += len(command) or 1
                tree, divided = ("/", tree, self.signed_power()), True
            elif char and (char.isalnum() and char.isascii() or char == "(" or command):
                if divided:
                    raise Unreadable("1/2x reads two ways")
                if char.isdigit() or char == ".":
                    raise Unreadable("two numbers side by side")
                tree = self.juxtapose(tree)
            else:
                return ("-", tree) if sign else tree

    def juxtapose(self, left):
        """Multiplication, except for an integer literal before a fraction of integers: a mixed number."""
        is_fraction = self.command() == "\\frac"
        right = self.power()
        whole = left[0] == "n" and left[1].denominator == 1 and right[0] == "/"
        if is_fraction and whole and right[1][0] == "n" and right[2][0] == "n":
            return ("+", left, right)
        return ("*", left, right)

    def signed_power(self):
        sign = False
        while self.peek() in ("+", "-"):
            sign ^= self.text[self.at] == "-"
            self.at += 1
        tree = self.power()
        return ("-", tree) if sign else tree

    def power(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        tree = self.atom()
        while self.peek() == "!":
            self.at += 1
            tree = ("!", tree)
        if self.peek() == "^":
            self.at += 1
            tree = ("^", tree, self.group() if self.peek() == "{" else self.signed_power())
        self.depth -= 1
        return tree

    def group(self):
        self.expect("{")
        tree = self.sum()
        self.expect("}")
        return tree

    def argument(self):
        """A TeX argument: a group, or one token (a single digit, letter or command)."""
        char = self.peek()
        if char == "{":
            return self.group()
        if char.isdigit() and char.isascii():
            self.at += 1
            return ("n", Fraction(char))
        return self.atom()

    def atom(self):
        char = self.peek()
        number = _NUMBER.match(self.text, self.at)
        if number:
            self.at = number.end()
            if self.peek() == "_":
                raise Unreadable("number base")
            return ("n", Fraction(number[0]))
        if char == "{":
            return self.group()
        if char == "(":
            self.at += 1
            tree = self.sum()
            self.expect(")")
            return tree
        if char.isascii() and char.isalpha():
            self.at += 1
            return ("v", char + self.subscript())
        command = self.command()
        self.at += len(command)
        if command == "\\frac":
            return ("/", self.argument(), self.argument())
        if command == "\\sqrt":
            order = ("n", Fraction(2))
            if self.peek() == "[":
                self.at += 1
                order = self.sum()
                self.expect("]")
            return ("root", self.argument(), order)
        if command in ("\\pi", "\\theta", "\\alpha", "\\beta", "\\lambda"):
            return ("v", command + self.subscript())
        raise Unreadable(char)

    def subscript(self) -> str:
        match = re.compile(r"_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\})").match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match[0].replace("{", "").replace("}", "") if match else ""


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise Unreadable("root")
    if base == 0 and exponent <= 0:
        raise Unreadable("0 to a power below 1")
    size = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and abs(exponent) * size > MAX_BITS:
        raise TooCostly("power")
    return base ** (int(exponent) % 2 if abs(base) == 1 else int(exponent))


def _evaluate(tree) -> Fraction:
    kind = tree[0]
    if kind == "n":
        return tree[1]
    if kind in ("v", "root"):
        raise Unreadable("not rational")
    left = _evaluate(tree[1])
    if kind == "-":
        return -left
    if kind == "!":
        if left.denominator != 1 or left < 0:
            raise Unreadable("factorial")
        if left > MAX_FACTORIAL:
            raise TooCostly("factorial")
        return Fraction(math.factorial(int(left)))
    right = _evaluate(tree[2])
    if kind == "^":
        return _power(left, right)
    if kind == "/":
        if right == 0:
            raise Unreadable("division by zero")
        return left / right
    value = left + right if kind == "+" else left * right
    if value.numerator.bit_length() + value.denominator.bit_length() > 4 * MAX_BITS:
        raise TooCostly("size")
    return value


def exact(text: str) -> Fraction | None:
    """The exact rational value of normalised LaTeX or plain text, or None where it is not a rational expression.

    Raises TooCostly for powers and factorials beyond the limits.
    """
    text = text.strip()
    if _PLAIN.fullmatch(text) and len(text) <= MAX_CHARS:
        return Fraction(int(text))
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific:
        return Fraction(scientific[1]) * _power(Fraction(10), Fraction(scientific[2]))
    mixed = _MIXED.fullmatch(text)
    if mixed and int(mixed[4]):
        value = int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4]))
        return -value if mixed[1] == "-" else value
    try:
        return _evaluate(_Parser(text).parse())
    except Unreadable:
        return None


_POINTS = (0.6180339887498949, 0.7548776662466927, 0.8191725133961645)
"""Where letters are evaluated: irrational and below 1, so that long polynomials neither overflow nor cancel."""


class _Probe:
    """Complex double value of a tree at one point; `scale` is the largest term ever added, for the error of sums."""

    def __init__(self, point: float):
        self.point, self.names, self.scale = point, {}, 0.0

    def letter(self, name: str) -> complex:
        if name == "i":
            return 1j
        if name == "e":
            return complex(math.e)
        if name == "\\pi":
            return complex(math.pi)
        code = sum((index + 3) * ord(char) for index, char in enumerate(name))
        return complex((self.point * (code + 1)) % 0.9 + 0.05)

    def value(self, tree) -> complex:
        kind = tree[0]
        if kind == "n":
            return complex(float(tree[1]))
        if kind == "v":
            return self.letter(tree[1])
        left = self.value(tree[1])
        if kind == "-":
            return -left
        if kind == "!":
            raise Unreadable("factorial")
        right = self.value(tree[2])
        if kind in ("root", "^"):
            exponent = 1 / right if kind == "root" else right
            if left.real < 0 and abs(left.imag) < 1e-12 and exponent.real % 0.5:
                raise Unreadable("real or principal root")
            return left**exponent
        if kind == "/":
            return left / right
        if kind == "+":
            self.scale = max(self.scale, abs(left), abs(right))
            return left + right
        return left * right


def differ(first: str, second: str) -> bool:
    """True where two expressions certainly have different values; False where they agree or cannot be read.

    Relative tolerance 1e-9 of the value and of every term added on the way: far above double rounding.
    """
    try:
        trees = _Parser(first).parse(), _Parser(second).parse()
        for point in _POINTS:
            probes = _Probe(point), _Probe(point)
            values = [probe.value(tree) for probe, tree in zip(probes, trees, strict=True)]
            if not all(cmath.isfinite(value) for value in values):
                return False
            scale = max(abs(values[0]), abs(values[1]), probes[0].scale, probes[1].scale)
            if 0 < scale and abs(values[0] - values[1]) > 1e-9 * scale:
                return True
    except (Unreadable, OverflowError, ZeroDivisionError):
        return False
    return False
