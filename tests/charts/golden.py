"""`python -m tests.charts.golden` renders every set of values anew into golden/; read the diff before committing."""

from tests.charts.helm import GOLDEN, SETS, masked, template


def main() -> None:
    for file in GOLDEN.glob("*.yaml"):
        file.unlink()
    for name, values in SETS.items():
        (GOLDEN / f"{name}.yaml").write_text(masked(template(values)))


if __name__ == "__main__":
    main()
