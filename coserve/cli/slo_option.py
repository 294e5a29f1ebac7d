"""Options that are SLOs."""

import typer


def slo_option(text: str | None) -> str | None:
    """Return the text of an SLO, after a check that happens before anything is loaded."""
    from coserve.server.units import slo_seconds

    if text is not None:
        try:
            slo_seconds(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return text
