"""The layout of a trace file: one Parquet row per node of a supertree, and what a file says about itself.

A trace is long form, sorted by prompt, position and node, one row group per prompt, zstd. pandas, polars and DuckDB
read it as it is. What belongs to the whole file is JSON under the schema's metadata key ``treespec.trace``.

======== ======= ======================================================================================
prompt   string  id in the prompt file
position int32   absolute position of the root, the last committed token
node     int16   index within the position, 0 for the root; parents come before children, siblings by rank
parent   int16   index of the parent, -1 at the root
depth    uint8   0 at the root
token    int32   token id
rank     int16   place among the siblings in the draft's order
logp     float32 draft log-probability given the parent, nats; 0 at the root
entropy  float32 of the draft's distribution *at* the node, bits; NaN where the draft was not asked
offered  int16   children that the draft had to offer there, at most the recorder's width; -1 where it was not asked
is_true  bool    on the text that the target went on to write; always true at the root
room     int16   levels that a tree rooted here may have: what is left of the text's length and of the models' contexts
======== ======= ======================================================================================
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from treespec.errors import PolicyError, TraceError
from treespec.files import check_regular, parse_json
from treespec.policies.base import number, whole

SCHEMA = 1
KEY = b"treespec.trace"
MOST = 32767  # of an int16

COLUMNS = pa.schema(
    [
        ("prompt", pa.string()),
        ("position", pa.int32()),
        ("node", pa.int16()),
        ("parent", pa.int16()),
        ("depth", pa.uint8()),
        ("token", pa.int32()),
        ("rank", pa.int16()),
        ("logp", pa.float32()),
        ("entropy", pa.float32()),
        ("offered", pa.int16()),
        ("is_true", pa.bool_()),
        ("room", pa.int16()),
    ]
)
# what a mantissa holds cannot be compressed, but its exponent's byte can: bytes of one significance lie together.
# For the rest plain numbers under zstd came out smaller than dictionaries (1.68 against 1.94 kB a position)
ENCODING = {"logp": "BYTE_STREAM_SPLIT", "entropy": "BYTE_STREAM_SPLIT", "node": "DELTA_BINARY_PACKED"}
DICTIONARY = ["prompt", "offered", "room"]


@dataclass(frozen=True)
class Caps:
    """How far a recorded supertree reaches.

    Args:
        floor: least path probability of a node.
        depth: most levels.
        width: most children of a node that the draft is asked to rank.
        nodes: of the nodes down to any depth, those that are not among so many most probable ones are left out.
        narrow: the same holds apart for the trees of so many children, since a policy that takes few children of a
            node looks further down among them.
    """

    floor: float = 1e-4
    depth: int = 10
    width: int = 64
    nodes: int = 64
    narrow: tuple[int, ...] = (10, 4)

    def __post_init__(self) -> None:
        number("floor", self.floor, 0, 1)
        whole("depth", self.depth, 1, 64)
        whole("width", self.width, 1, 1024)
        whole("nodes", self.nodes, 1)
        if not isinstance(self.narrow, (tuple, list)):
            raise PolicyError(f"narrow must be whole numbers such as 10/4; got {self.narrow!r}")
        for value in self.narrow:
            whole("narrow", value, 1, 1024)
        object.__setattr__(self, "narrow", tuple(self.narrow))

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the trees whose best nodes are recorded."""
        return (self.width, *self.narrow)


@dataclass(frozen=True)
class PromptInfo:
    """One prompt of a trace.

    Args:
        number: its place in the prompt file.
        id, category: as there.
        prompt_tokens: length of the prompt; position ``prompt_tokens`` holds the first new token.
        new_tokens: length of the target's text.
        last: its last token, the only one that is nowhere a root.
    """

    number: int
    id: str
    category: str
    prompt_tokens: int
    new_tokens: int
    last: int

    def check(self) -> None:
        """Refuse what no recording writes.

        Raises:
            TypeError: naming it.
        """
        for name in ("number", "prompt_tokens", "new_tokens", "last"):
            value = getattr(self, name)
            least = 0 if name in ("number", "last") else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
                raise TypeError(f"{name} of a prompt is {value!r}")
        if not isinstance(self.id, str) or not isinstance(self.category, str):
            raise TypeError("id and category of a prompt must be text")

    @property
    def positions(self) -> int:
        """Roots of this prompt: every new token but the last."""
        return self.new_tokens - 1


def dress(table: pa.Table, about: dict[str, Any], prompts: list[PromptInfo]) -> pa.Table:
    """The table with the file's metadata."""
    content = {"schema": SCHEMA, **about, "prompts": [asdict(p) for p in prompts]}
    return table.cast(COLUMNS).replace_schema_metadata({KEY: json.dumps(content)})


def write_groups(path: Path, groups: list[pa.Table], about: dict[str, Any], prompts: list[PromptInfo]) -> None:
    """Write a trace file, one row group per table."""
    schema = dress(COLUMNS.empty_table(), about, prompts).schema
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=19,
        use_dictionary=DICTIONARY,
        column_encoding=ENCODING,
        write_statistics=["prompt", "position"],
        write_page_checksum=True,
    ) as writer:
        for table in groups:
            if len(table):
                whole_group = table.cast(COLUMNS).replace_schema_metadata(schema.metadata)
                writer.write_table(whole_group, row_group_size=len(table))


def read_file(path: str | Path) -> tuple[pa.Table, dict[str, Any], list[PromptInfo]]:
    """Rows and metadata of a trace file; nothing in it is executed.

    Raises:
        TraceError: if it cannot be read, is no trace, or comes from a newer treespec.
    """
    if not os.path.lexists(path):
        raise TraceError(f"there is no trace {path}; make one with treespec record")
    try:
        check_regular(path)
        file = pq.ParquetFile(path, page_checksum_verification=True)
        about = read_about(file.schema_arrow.metadata, path)
        table = file.read()
        table.validate(full=True)
    except TraceError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise TraceError(f"{path} cannot be read as Parquet ({reason}); it may be cut short: record it again") from None
    if table.schema.remove_metadata() != COLUMNS:
        raise TraceError(f"{path} does not have the columns of a trace: {', '.join(COLUMNS.names)}")
    try:
        prompts = [PromptInfo(**p) for p in about.pop("prompts")]
        Caps(**about["caps"])
        for about_prompt in prompts:
            about_prompt.check()
    except (KeyError, TypeError, AttributeError, PolicyError) as error:
        raise TraceError(f"{path} says nothing of its prompts or caps that can be understood ({error})") from None
    return table, about, prompts


def read_about(metadata: dict[bytes, bytes] | None, path: str | Path) -> dict[str, Any]:
    """What a file says about itself.

    Raises:
        TraceError: if it is no trace, or a newer treespec's.
    """
    try:
        about = parse_json((metadata or {})[KEY].decode("utf-8"))
        number = about["schema"]
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise TypeError("its schema is no number")
    except (KeyError, ValueError, TypeError):
        raise TraceError(f"{path} is a Parquet file but not a treespec trace; make one with treespec record") from None
    if number > SCHEMA:
        raise TraceError(
            f"{path} has trace schema {number}, this treespec reads up to {SCHEMA}; install the newer treespec"
        )
    del about["schema"]
    return dict(about)
