"""``traceaudit devices``: print the table of peaks."""

import click


@click.command()
@click.option("--sources", is_flag=True, help="Print where the figures come from as well.")
def devices(sources: bool) -> None:
    """Print the table of dense peak rates and memory bandwidths, one GPU a line.

    A ~ stands before a figure that its source leaves in doubt, - where a GPU has no such rate.
    """
    from traceaudit.mfu.hardware import table_rows

    head, *rows = table_rows()
    shown = len(head) - 2
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(shown)]
    for row in (head, *rows):
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip())
        if sources and row is not head:
            click.echo(f"    {row[shown]}" + (f" ({row[shown + 1]})" if row[shown + 1] else ""))
