"""A rank as the staging tests need it: attaches to the region through /proc, fills its heads, marks.

Run as `python writer_process.py REF GEOMETRY WRITER WRITERS` (JSON, JSON, numbers). Reads one order a line from
standard input, {"slot", "generation", "groups", "key", and maybe "usable", "part"}, and answers each with a line.
"""

import json
import random
import sys

from tplayout.format.geometry import Geometry
from tplayout.format.layout import chunk_layout
from tplayout.format.sharding import head_range
from tplayout.staging.region import Region, RegionRef


def cell(key, group, head, position, nbytes):
    """The bytes that belong there: a function of the place alone, so that tests know them too."""
    return random.Random(f"{key} {group} {head} {position}").randbytes(nbytes)


def fill(region, layout, order, group, heads):
    """Write the cells of these heads."""
    view = region.slot(order["slot"], group)
    for head in heads:
        for position in range(len(layout.group.layers)):
            span = layout.cell_range(head, position)
            view[span.start : span.stop] = cell(order["key"], group, head, position, len(span))


def main():
    """Obey orders until standard input ends."""
    ref, geometry, writer, writers = map(json.loads, sys.argv[1:5])
    region = Region.attach(RegionRef.from_json(ref))
    geometry = Geometry.from_json(geometry)
    for line in sys.stdin:
        order = json.loads(line)
        for group in order["groups"]:
            layout = chunk_layout(geometry, group, "xxh3-128")
            fill(region, layout, order, group, head_range(layout.group.heads, writers, writer))
            if not order.get("part"):
                usable = order.get("usable", True)
                region.mark(order["slot"], group, writer, order["generation"], usable=usable)
        print("done", flush=True)


if __name__ == "__main__":
    main()
