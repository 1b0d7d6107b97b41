"""What a document shows is compared with what is printed, as far as it can be the same twice."""

import pytest

from tests.docs.outputs import missing

PRINTED = """NAME                     READY  AGE
loraplane-gateway-6f-x2  1/1    31s
loraplane-registry-5-zz  1/1    2m3s

ready: smollm2 (b1b2)
"""


@pytest.mark.parametrize(
    ("shown", "lacks"),
    [
        (PRINTED, []),
        ("NAME READY AGE\nloraplane-gateway-… 2/2 4s\n", []),
        ("…\nready: smollm2 (…)\n", []),
        ("loraplane-operator-… 1/1 4s\n", ["loraplane-operator-… 1/1 4s"]),
        ("NAME READY\n", ["NAME READY"]),
        ("ready: smollm2 (…)\nNAME READY AGE\n", ["NAME READY AGE"]),
        ("loraplane-gateway-… Running 4s\n", ["loraplane-gateway-… Running 4s"]),
    ],
)
def test_words_must_be_there_in_order_and_numbers_may_differ(shown: str, lacks: list[str]) -> None:
    assert missing(shown, PRINTED) == lacks
