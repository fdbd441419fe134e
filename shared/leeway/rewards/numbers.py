r"""Numbers as a person reads them in an English text. What cannot be read is no number, never an exception.

signs         -5 +5 and typographic ones (U+2212, en dash, full-width); after a digit, a letter, a closing
              bracket or another dash, a dash is no sign: 10-5, GPT-4, (3)-4
decimals      3.14 .5 5.            exponents  1e5 1.2×10^-3 10⁵ 2^10
thousands     1,234 12,34,567 1'234 1_234 and thin or no-break spaces; two numbers are `1, 234`, `1,23` and,
              with a plain space, `1 234`
fractions     3/4 3⁄4 ¾ 2 3/4 1½     percent   50% (see `same_number`)
currency      $5 -£5 $-5 5€          LaTeX     \boxed{5} $5$ \frac{3}{4} 2\frac34 1{,}234 10^{5} 50\% \text{5}
digits        those of every script  not read  1.2.3 10:30 1/2/3 1/0 0x1F ±5 √2, more than MAX_DIGITS digits

Digits that follow a Latin letter are part of a name, not a number: x5, H2O.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 1000
"""Maximum number of digits of a number, and maximum absolute value of an exponent."""

_CHARACTERS = {
    **dict.fromkeys("\u2212\ufe63\uff0d\u2010\u2011\u2012\u2013", "-"),
    **dict.fromkeys("\u00a0\u2007\u2009\u202f", "\u202f"),
    **dict.fromkeys("\u2044\u2215\uff0f", "/"),
    **dict.fromkeys("\u00d7\u22c5\u00b7\u2217", "*"),
    **dict.fromkeys("\u066a\uff05\ufe6a", "%"),
    **dict.fromkeys("\u2019\u02bc", "'"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    "\uff0b": "+",
    "\uff0c": ",",
    "\uff0e": ".",
    "\uff1a": ":",
    "\uff04": "$",
}
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True))


class _Plain(dict[int, str]):
    """Table for str.translate: characters that are written in several ways, and the digits of all scripts."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        plain = _CHARACTERS.get(character, character)
        digit = unicodedata.decimal(character, None)
        if digit is not None:
            plain = str(digit)
        elif unicodedata.category(character) == "No" and "\u2044" in unicodedata.normalize("NFKC", character):
            # ½ after a digit is a mixed number: 1½ becomes 1 1/2.
            plain = " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
        self[code] = plain
        return plain


_PLAIN = _Plain()
_RAISED = re.compile(r"(?<=[\d)])[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")

# LaTeX is rewritten in this order.
_LATEX = [
    (re.compile(r"\\[!]"), ""),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,)(?=\d{3})"), ","),
    (re.compile(r"\\[,;: ]|~"), " "),
    (re.compile(r"\\sqrt\s?\{([^{}]{1,400})\}|\\sqrt\s?(?=\d)"), r"√\1"),
    (re.compile(r"(?<=\d)\s?\\[dtc]?frac"), r" \\frac"),  # 2\frac{3}{4}, a mixed number
    (re.compile(r"\\[dtc]?frac\s?\{([^{}]{1,400})\}\s?\{([^{}]{1,400})\}"), r"\1/\2"),
    (re.compile(r"\\[dtc]?frac\s?(\d)\s?(\d)"), r"\1/\2"),
    (re.compile(r"([_^])\s?\{\s?([+-]?\w+)\s?\}"), r"\1\2"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\pm(?![A-Za-z])"), "±"),
    (re.compile(r"\\([$%#&_{}])"), r"\1"),
    (re.compile(r"\\[A-Za-z]+|\\[()\[\]]"), " "),
]
_BOXED = re.compile(r"\\(?:boxed|fbox)\s?\{")

_UNSIGNED = r"""
    (?: \d{1,3} (?P<separator>[,'_\u202f]) \d{3} (?: (?P=separator) \d{3} )* (?!\d)   # 1,234,567
      | \d{1,2} (?: ,\d{2} )+ ,\d{3} (?!\d)                                           # 12,34,567
      | \d+ )
    (?: \.\d+ )?
  | \.\d+
"""
_NUMBER = re.compile(
    rf"""
    (?<![\dA-Za-z_]) (?<!\d[./])                           # not inside a name or another number
    (?P<sign> (?<![)\]}}%^-]) [+-] (?: (?<=[=≈][+-])\  | (?<=[=≈]\ [+-])\  )? )?     # = - 5 is -5
    (?: [$€£¥₹] (?P<inner>-)? )?                           # $-5
    (?<![\dA-Za-z_^])
    (?P<whole> \d{{1,9}}\  (?=\d{{1,9}}/\d) )?             # the 2 of 2 3/4
    (?P<number> {_UNSIGNED} )
    (?: [eE] (?P<exponent> [+-]?\d+ ) (?![A-Za-z\d])
      | \s? [*x] \s? 10 \s? (?: \^ | \*\* ) \s? \(? (?P<power_of_ten> [+-]?\d+ ) \)?
      | (?: \^ | \*\* ) \(? (?P<power> [+-]?\d+ ) \)?
      | \s? / \s? (?P<denominator> -? (?: \d+ (?: \.\d+ )? | \.\d+ ) ) )?
    (?P<rest> [.:/^] [\d.:/^]* \d | [xX][0-9A-Fa-f]+ (?![A-Za-z]) )?
    (?P<percent> \s?% | \s percent\b )?
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Number:
    """A number, exactly; `percent`: it had a percent sign (50% is the value 50 with `percent`)."""

    value: Fraction
    percent: bool = False


def same_number(answer: Number, response: Number) -> bool:
    """Whether a response's number is the answer.

    If both or neither are percentages, their values are compared. If one is, 50% equals 50 and 0.5.
    """
    if answer.value == response.value:
        return True
    if answer.percent == response.percent:
        return False
    share, other = (answer, response) if answer.percent else (response, answer)
    return share.value / 100 == other.value


def find_last_number(text: str) -> Number | None:
    r"""The last number in `text`; None if there is none, or if the last one cannot be read.

    If the text has a \boxed{...}, only the content of the last one is searched.
    """
    last = _last_match(_NUMBER, _simplify(_last_boxed(text)))
    return _read(last) if last else None


def read_number(text: str) -> Number | None:
    r"""The number that `text` consists of, also in $...$ or \boxed{...}; None if it is something else."""
    plain = _simplify(_last_boxed(text)).strip()
    if plain.startswith("$") and plain.endswith("$"):
        plain = plain.strip("$")
    plain = plain.strip(" {}\t\r\n").removesuffix(".").rstrip("€£¥₹$ ")
    match = _NUMBER.fullmatch(plain)
    return _read(match) if match else None


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _last_boxed(text: str) -> str:
    r"""The content of the last \boxed{...} in `text`, or `text`."""
    opening = _last_match(_BOXED, text)
    if opening is None:
        return text
    depth, start = 1, opening.end()
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start:position]
    return text[start:]


def _simplify(text: str) -> str:
    """`text` with one way to write each sign, digit, fraction and power."""
    if not text.isascii():
        text = _RAISED.sub(lambda raised: "^" + "".join(_SUPERSCRIPTS[c] for c in raised.group()), text)
        text = text.translate(_PLAIN)
    if "\\" in text or "^" in text or "{" in text:
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    return text


def _read(match: re.Match[str]) -> Number | None:
    """The value of a match of _NUMBER; None if it is no number, too long, or a fraction of zero."""
    part = match.groupdict()
    before = match.string[match.start() - 1 : match.start()]
    longest = max(len(text) for text in part.values() if text is not None)
    if part["rest"] or before in ("±", "√") or longest > MAX_DIGITS:
        return None
    value = Fraction(re.sub("[,'_\u202f]", "", part["number"]))
    raised = int(part["exponent"] or part["power_of_ten"] or 0)
    power = int(part["power"] or 0)
    digits = len(part["number"])
    if abs(raised) > MAX_DIGITS or abs(power) * digits > MAX_DIGITS:
        return None
    try:
        value *= Fraction(10) ** raised
        if part["power"]:
            value **= power
        if part["denominator"]:
            value /= Fraction(part["denominator"])
    except ZeroDivisionError:
        return None
    if part["whole"] and value < 1:
        value += int(part["whole"])
    negative = (part["sign"] or "").startswith("-") != bool(part["inner"])
    return Number(-value if negative else value, percent=bool(part["percent"]))
