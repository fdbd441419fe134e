"""The built-in rewards on numbers in all the forms that people, models and LaTeX write them in."""

import time
from fractions import Fraction

import pytest

from leeway.rewards import REWARDS
from leeway.rewards.numbers import MAX_DIGITS, Number, find_last_number, read_number
from leeway.tasks import TaskError, TaskItem, load_task, task_config

DIGITS = load_task(task_config(kind="digits"))

LAST_NUMBER = [
    # signs
    ("5", "so it is -5", 0),
    ("-5", "so it is -5", 1),
    ("5", "so it is \u22125", 0),
    ("-5", "so it is \u22125", 1),
    ("-5", "so it is \u20135", 1),  # en dash
    ("-5", "so it is \uff0d5", 1),  # full-width
    ("\u22125", "-5", 1),
    ("5", "+5", 1),
    ("+5", "5", 1),
    ("-5", "x = - 5", 1),
    ("-5", "(-5)", 1),
    ("5", "10-5", 1),
    ("5", "10\u20135", 1),  # a range
    ("4", "GPT-4", 1),
    ("5", "the answer\u20145", 1),  # em dash
    ("5", "x=\u00b15", 0),
    # decimals
    ("5", "the answer is .5", 0),
    ("0.5", "the answer is .5", 1),
    (".5", "0.50", 1),
    ("5", "It is 5.", 1),
    ("5.", "5.0", 1),
    ("-0.5", "-.5", 1),
    ("3.14", "about 3.14159", 0),
    ("3", "1.2.3", 0),
    ("30", "at 10:30", 0),
    # exponents and powers
    ("5", "about 1e5", 0),
    ("100000", "about 1e5", 1),
    ("0.001", "1E-3", 1),
    ("0.0012", "1.2×10^-3", 1),
    ("0.0012", r"$1.2 \times 10^{-3}$", 1),
    ("1200", "1.2 * 10**3", 1),
    ("100000", "10⁵", 1),
    ("1e5", "100,000", 1),
    ("1024", "2^10", 1),
    ("10", "2^10", 0),
    ("2", "5 m^2", 0),
    # thousands
    ("1234", "1,234", 1),
    ("1,234", "1234", 1),
    ("234", "1, 234", 1),
    ("23", "1,23", 1),
    ("3", "1,2,3", 1),
    ("1234567", "1,234,567.00", 1),
    ("1234567", "12,34,567", 1),
    ("1234", "1\u202f234", 1),
    ("1234", "1\u00a0234", 1),
    ("234", "1 234", 1),
    ("1234567", "1'234'567", 1),
    ("1234", "1\u2019234", 1),
    ("1000", "1_000", 1),
    ("1234", r"1{,}234", 1),
    ("1234", r"1,\!234", 1),
    # fractions
    ("3/4", "0.75", 1),
    ("0.75", "3/4", 1),
    ("4", "3/4", 0),
    ("0.75", "3\u20444", 1),
    ("3/4", "¾", 1),
    ("1.5", "1½", 1),
    ("2.75", "2 3/4", 1),
    ("-3/4", "-3 / 4", 1),
    ("2", "1/2/3", 0),
    ("0", "1/0", 0),
    # percent
    ("50%", "50 %", 1),
    ("50", "50%", 1),
    ("0.5", "50%", 1),
    ("50%", "0.5", 1),
    ("50%", "50", 1),
    ("50%", "5%", 0),
    ("50%", "0.5%", 0),
    ("50%", "50 percent", 1),
    ("50%", r"50\%", 1),
    # currency
    ("5", "$5", 1),
    ("-5", "-$5", 1),
    ("-5", "$-5", 1),
    ("1200", "€1,200.00", 1),
    ("5", "5€", 1),
    ("$5", "5", 1),
    # LaTeX
    ("5", r"\boxed{5}", 1),
    ("5", r"so \boxed{5}, in 3 steps", 1),
    ("3", r"so \boxed{5}, in 3 steps", 0),
    ("5", r"\boxed{4} or rather \boxed{ 5 }", 1),
    ("0.75", r"\boxed{\frac{3}{4}}", 1),
    ("3/4", r"$\dfrac34$", 1),
    ("-0.75", r"$-\frac{3}{4}$", 1),
    ("2.75", r"$2\frac{3}{4}$", 1),
    (r"\frac{3}{4}", "0.75", 1),
    ("$5$", "5", 1),
    (r"\boxed{5}", "5", 1),
    ("5", r"\(x = 5\)", 1),
    ("5", r"\boxed{\text{5 apples}}", 1),
    ("2", r"\sqrt{2}", 0),
    ("5", r"\boxed{x}, not 5", 0),
    # digits of other scripts, names, and what is no number
    ("12", "１２", 1),
    ("12", "١٢", 1),
    ("-12", "\uff0d１２", 1),
    ("12", "答案是12。", 1),
    ("5", "see x5", 0),
    ("31", "0x1F", 0),
    ("0", "0x1F", 0),
    ("12", "**12**", 1),
    ("12", "12 or 13", 0),
    ("5", "five", 0),
    ("5", "", 0),
    ("7", "7" * 5000, 0),
    ("7", "1e5000", 0),
    ("7", "1e-99999999999", 0),
    ("7", "9^99999999", 0),
]
EXACT = [
    ("1234", " 1234\n", 1),
    ("1234", "1234.", 0),
    ("1234", "1,234", 0),
    ("5", "5.0", 0),
    ("-5", "\u22125", 0),
    ("5", "+5", 0),
    ("12", "１２", 0),
    ("7", "7" * 5000, 0),
    ("caf\u00e9", "cafe\u0301", 1),
    ("5", "\x00", 0),
    ("5", "", 0),
]
SORTED = [
    ("1234", "1234", 1),
    ("1234", " 1234\n", 1),
    ("1234", "１２３４", 0),
    ("12", "\u221212", 0),
    ("12", "", 0),
]


def params(table):
    return [pytest.param(*row, id=f"{row[0]!a}-{row[1][:20]!a}") for row in table]


@pytest.mark.parametrize(("answer", "response", "reward"), params(LAST_NUMBER))
def test_last_number(answer, response, reward):
    item = TaskItem(0, "p", answer)
    REWARDS["last_number"].check(item, DIGITS)
    assert REWARDS["last_number"].score(item, response, DIGITS) == reward


@pytest.mark.parametrize(("answer", "response", "reward"), params(EXACT))
def test_exact_compares_texts(answer, response, reward):
    assert REWARDS["exact"].score(TaskItem(0, "p", answer), response, DIGITS) == reward


@pytest.mark.parametrize(("answer", "response", "reward"), params(SORTED))
def test_the_verifier_of_digits_compares_characters(answer, response, reward):
    assert REWARDS["verifier"].score(TaskItem(0, "p", answer), response, DIGITS) == reward


@pytest.mark.parametrize(
    "answer",
    ["", "five", "5 km", "1 234", "1.2.3", "1/0", "#### 5", "5 or 6", "1e5000", "7" * 5000, "\u00b15"],
)
def test_an_answer_that_is_no_number_is_refused_at_load(answer):
    with pytest.raises(TaskError, match="which is not a number"):
        REWARDS["last_number"].check(TaskItem(0, "p", answer), DIGITS)


def test_an_empty_answer_is_refused_for_exact():
    with pytest.raises(TaskError, match="the answer of item 0 of task digits is empty"):
        REWARDS["exact"].check(TaskItem(0, "p", " "), DIGITS)


def test_numbers_are_exact():
    third = Fraction(1, 3)
    assert read_number("1/3") == Number(third)
    assert read_number("0.1") == Number(Fraction(1, 10))
    assert read_number("1" * MAX_DIGITS) == Number(Fraction(int("1" * MAX_DIGITS)))
    assert read_number("12.5%") == Number(Fraction(25, 2), percent=True)


LONG = 200_000


@pytest.mark.parametrize(
    "text",
    [
        *(
            piece * LONG
            for piece in ("1", " ", "-", "$", ".", "1,", "1 ", "1/", "1.", "e1", "x1", "^", "{", "½")
        ),
        *(piece * (LONG // 4) for piece in ("1,234", "\\frac{", "\\boxed{", "10^{", "1e5", "1 1/", "−1")),
        "1" + " " * LONG,
        "1," + "234," * LONG,
        "\\boxed{" + "{" * LONG,
        "\\frac{" + "1" * LONG + "}{2}",
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_reading_takes_linear_time(text):
    started = time.process_time()
    find_last_number(text)
    read_number(text)
    assert time.process_time() - started < 5
