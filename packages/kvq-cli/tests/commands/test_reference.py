import re

import typer

from kvq_cli.commands.reference import markdown
from kvq_cli.main import app


def test_the_page_has_every_option_of_every_command():
    text = markdown()
    root = typer.main.get_command(app)
    for name, command in root.commands.items():
        section = text.partition(f"## kvq {name}\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert f"`{parameter.opts[0]}" in section
                assert parameter.help.replace("|", "\\|") in section


def test_every_row_of_a_table_has_three_cells():
    rows = [line for line in markdown().splitlines() if line.startswith("| `-")]
    assert len(rows) > 10
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}


def test_the_page_does_not_depend_on_the_terminal(monkeypatch):
    wide = markdown()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERMINAL_WIDTH", "40")
    assert markdown() == wide
