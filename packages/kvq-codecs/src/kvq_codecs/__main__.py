"""`python -m kvq_codecs`: the table of formats."""

from kvq_codecs.table import render, rows

if __name__ == "__main__":
    print(render(rows()), end="")
