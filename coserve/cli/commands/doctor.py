"""`coserve doctor`: finds faults of a home, and repairs what it can without loss."""

import json
from functools import partial
from typing import Annotated

import typer

from coserve.cli.at_rest import Database, Home, store_at_rest


def doctor(
    home: Home = None,
    database: Database = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair what can be repaired without loss.")
    ] = False,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Number of ranks that coserve up is to start on this machine."
        ),
    ] = 1,
    device: Annotated[str, typer.Option(help="Device of the ranks: cpu, cuda, or auto.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="CPU threads per rank.")] = 1,
) -> None:
    """Check a home (records, files, checkpoints, adapters, permissions) while no server uses it.

    The status is 1 if a fault is found, or is left after --repair. --repair deletes nothing that a
    record names, and moves aside what none names. Warns of slow kernels and, with
    --tensor-parallel, of a machine that has no place for that many ranks. The last line is JSON.
    """
    from coserve.cli.tables import console, table
    from coserve.jobs.maintenance.doctor import Finding, examine
    from coserve.kernels.cpu_library import why_none
    from coserve.protocol.run_directory import remove_socket_directory

    with store_at_rest(home, database) as (directory, store):
        findings = examine(directory, store)
        findings += [
            Finding(
                about=str(path.relative_to(directory)),
                problem="the socket of a server that was killed",
                remedy="is removed, as the next server would",
                mend=partial(remove_socket_directory, path),
            )
            for path in sorted((directory / "run").glob("*"))
        ]
        mended = []
        for finding in findings if repair else ():
            if finding.mend is not None:
                finding.mend()
                mended.append(finding)
    listing = table("about", "fault", "repaired" if repair else "repair")
    for finding in findings:
        can_be = finding.mend is not None
        by = "" if not can_be or repair else "--repair: it "
        listing.add_row(finding.about, finding.problem, f"{by}{finding.remedy}")
    console().print(listing if findings else f"nothing is wrong with {directory}")
    data = [
        {
            "about": finding.about,
            "problem": finding.problem,
            "remedy": finding.remedy,
            "repairable": finding.mend is not None,
            "mended": finding in mended,
        }
        for finding in findings
    ]
    left = len(findings) - len(mended)
    result = {"home": str(directory), "findings": data, "left": left}
    if warning := why_none():
        console().print(f"warning: {warning}", soft_wrap=True)
        result["kernels_warning"] = warning
    if tensor_parallel > 1:
        from coserve.devices.ranks.places import why_not

        said = f"this machine has a place for each of the {tensor_parallel} ranks"
        if reason := why_not(tensor_parallel, device, threads):
            said = f"warning: {reason}"
            result["ranks_warning"] = reason
        console().print(said, soft_wrap=True)
    print(json.dumps(result))
    if left:
        raise typer.Exit(1)
