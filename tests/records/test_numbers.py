"""Numbers as people read them."""

from slimstate.records.numbers import brief, fixed, magnitude, mebibytes


def test_numbers_are_readable():
    assert [magnitude(x) for x in (None, 1.234, 12345.6, 1.5e7)] == ["∞", "1.23", "12,346", "1.5e+07"]
    assert [brief(x) for x in (None, 5.44, 103.2, 65580.0, 2.1e6, 3e15)] == ["∞", "5.4", "103", "66k", "2M", "3e15"]
    assert [fixed(x, 1) for x in (None, -1.3, -0.01, 1234.5)] == ["–", "−1.3", "0.0", "1,234.5"]
    assert [mebibytes(x) for x in (2**17, 2**20, 3 * 2**30)] == ["0.125", "1.00", "3,072.00"]
