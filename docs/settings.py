"""Write docs/settings.md from the schema: `python docs/settings.py`."""

from __future__ import annotations

from pathlib import Path

from raytrain_bert.config.load import flag_of, settings_of
from raytrain_bert.config.sweep import SweepConfig


def settings_page() -> str:
    """Markdown: a table of settings for each section."""
    lines = [
        "# Settings",
        "",
        "Each setting is a key of an experiment file and a flag: `optim: {learning_rate: 3e-5}` in YAML is",
        "`--optim.learning-rate 3e-5`. A flag beats the file, the file beats the default. Lists take the flag more",
        "than once; a bare flag means true, `--no-SECTION.SETTING` false; the value `none` unsets. Unknown keys are",
        "refused.",
    ]
    section = ""
    for key, field in settings_of(SweepConfig):
        if key.partition(".")[0] != section:
            section = key.partition(".")[0]
            description = SweepConfig.model_fields[section].description
            lines += ["", f"## {section}", "", str(description), "", "| flag | default | meaning |", "|---|---|---|"]
        default = field.default
        shown = ", ".join(map(str, default)) if isinstance(default, list) else default
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{flag_of(key)}` | {'' if default is None else f'`{shown}`'} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(settings_page(), encoding="utf-8")
