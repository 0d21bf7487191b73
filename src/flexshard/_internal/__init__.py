"""What every room may use: whole-file writes, versioned documents, checks of arguments, lazily loaded names, Parquet
sources, jagged arrays and their duplicates, text tables, groups of ranks, errors that all ranks raise.

May import: errors, units. Imports torch, TorchRec, numba and pandas' relatives only where they are used.
"""

from flexshard._internal.lazy import lazy_exports

TYPE_CHECKING = False  # as in lazy.py

if TYPE_CHECKING:
    from flexshard._internal.checks import (
        check_above_0 as check_above_0,
        check_bytes as check_bytes,
        check_finite as check_finite,
        check_int as check_int,
        first_repeated as first_repeated,
        name_and_value as name_and_value,
        there_are as there_are,
    )
    from flexshard._internal.clocks import (
        Moment as Moment,
        device_of_group as device_of_group,
        moment as moment,
        seconds_between as seconds_between,
    )
    from flexshard._internal.collective_errors import (
        differing_ranks as differing_ranks,
        lost_rank as lost_rank,
        on_all_ranks as on_all_ranks,
        on_first_rank as on_first_rank,
    )
    from flexshard._internal.data_paths import (
        files_below as files_below,
        first_line as first_line,
        hidden_part as hidden_part,
        matching as matching,
    )
    from flexshard._internal.deprecation import (
        deprecated_attribute as deprecated_attribute,
        renamed_parameters as renamed_parameters,
    )
    from flexshard._internal.device_copies import (
        HostCopy as HostCopy,
        host_waits_for as host_waits_for,
        run_numbers as run_numbers,
        run_starts as run_starts,
        runs_of as runs_of,
        segment_of as segment_of,
        segment_within as segment_within,
        spread as spread,
        spread_on as spread_on,
        to_device as to_device,
    )
    from flexshard._internal.documents import (
        DocumentFormat as DocumentFormat,
        decode as decode,
        digest_of as digest_of,
        format_of as format_of,
        read_json as read_json,
        with_names as with_names,
        write_json as write_json,
    )
    from flexshard._internal.drafts import (
        draft_folder as draft_folder,
        free_target as free_target,
        put_in_place as put_in_place,
    )
    from flexshard._internal.file_stamps import (
        changed_data as changed_data,
        on_this_machine as on_this_machine,
        stamp_of as stamp_of,
    )
    from flexshard._internal.files import (
        PathLike as PathLike,
        checked_path as checked_path,
        folder_for as folder_for,
        make_folder as make_folder,
        read_text as read_text,
        reason_of as reason_of,
        replacing as replacing,
        replacing_all as replacing_all,
        write_text as write_text,
    )
    from flexshard._internal.jagged import (
        Distinct as Distinct,
        IntArray as IntArray,
        JaggedArray as JaggedArray,
        distinct_rows as distinct_rows,
        jagged_of_arrow as jagged_of_arrow,
        joined as joined,
        joined_range as joined_range,
    )
    from flexshard._internal.keyed_jagged import (
        of_keys as of_keys,
        with_flat_lengths as with_flat_lengths,
        with_values as with_values,
        without_weights as without_weights,
    )
    from flexshard._internal.lazy import INSTALL_TORCHREC as INSTALL_TORCHREC, bound as bound
    from flexshard._internal.messages import (
        Messages as Messages,
        PendingMessages as PendingMessages,
        all_to_all as all_to_all,
        runs_gloo as runs_gloo,
    )
    from flexshard._internal.optional import has_numba as has_numba, has_triton as has_triton
    from flexshard._internal.parquet_sources import (
        Chunk as Chunk,
        ParquetSource as ParquetSource,
        expand as expand,
        is_list as is_list,
        one_array as one_array,
        read_chunks as read_chunks,
    )
    from flexshard._internal.parts import parts_by_bytes as parts_by_bytes
    from flexshard._internal.process_groups import (
        LevelGroups as LevelGroups,
        group_behind as group_behind,
        level_groups as level_groups,
    )
    from flexshard._internal.ray_clusters import connect_to_ray as connect_to_ray
    from flexshard._internal.row_sums import NO_SLOT as NO_SLOT, sum_by_slot as sum_by_slot
    from flexshard._internal.runs import (
        check_sharing as check_sharing,
        run_layout as run_layout,
        shared_runs as shared_runs,
    )
    from flexshard._internal.sql import interrupts as interrupts, sql_name as sql_name, sql_text as sql_text
    from flexshard._internal.streams import (
        SideStream as SideStream,
        continued_on as continued_on,
        current_stream as current_stream,
        used_here as used_here,
    )
    from flexshard._internal.sums import plain_sum as plain_sum
    from flexshard._internal.text_tables import (
        UNLIMITED as UNLIMITED,
        Grid as Grid,
        as_text as as_text,
        new_grid as new_grid,
    )
    from flexshard._internal.weak_calls import weakly as weakly
    from flexshard._internal.yaml_documents import (
        StrictModel as StrictModel,
        load_yaml as load_yaml,
        located as located,
        save_yaml as save_yaml,
    )

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "checks": [
            "check_above_0",
            "check_bytes",
            "check_finite",
            "check_int",
            "first_repeated",
            "name_and_value",
            "there_are",
        ],
        "clocks": ["Moment", "device_of_group", "moment", "seconds_between"],
        "collective_errors": ["differing_ranks", "lost_rank", "on_all_ranks", "on_first_rank"],
        "deprecation": ["deprecated_attribute", "renamed_parameters"],
        "device_copies": [
            "HostCopy",
            "host_waits_for",
            "run_numbers",
            "run_starts",
            "runs_of",
            "segment_of",
            "segment_within",
            "spread",
            "spread_on",
            "to_device",
        ],
        "documents": ["DocumentFormat", "decode", "digest_of", "format_of", "read_json", "with_names", "write_json"],
        "drafts": ["draft_folder", "free_target", "put_in_place"],
        "data_paths": ["files_below", "first_line", "hidden_part", "matching"],
        "file_stamps": ["changed_data", "on_this_machine", "stamp_of"],
        "files": [
            "PathLike",
            "checked_path",
            "folder_for",
            "make_folder",
            "read_text",
            "reason_of",
            "replacing",
            "replacing_all",
            "write_text",
        ],
        "jagged": ["Distinct", "IntArray", "JaggedArray", "distinct_rows", "jagged_of_arrow", "joined", "joined_range"],
        "keyed_jagged": ["of_keys", "with_flat_lengths", "with_values", "without_weights"],
        "lazy": ["INSTALL_TORCHREC", "bound"],
        "messages": ["Messages", "PendingMessages", "all_to_all", "runs_gloo"],
        "optional": ["has_numba", "has_triton"],
        "parts": ["parts_by_bytes"],
        "parquet_sources": [
            "Chunk",
            "ParquetSource",
            "expand",
            "is_list",
            "one_array",
            "read_chunks",
        ],
        "process_groups": ["LevelGroups", "group_behind", "level_groups"],
        "ray_clusters": ["connect_to_ray"],
        "row_sums": ["NO_SLOT", "sum_by_slot"],
        "runs": ["check_sharing", "run_layout", "shared_runs"],
        "sums": ["plain_sum"],
        "streams": ["SideStream", "continued_on", "current_stream", "used_here"],
        "sql": ["interrupts", "sql_name", "sql_text"],
        "text_tables": ["UNLIMITED", "Grid", "as_text", "new_grid"],
        "weak_calls": ["weakly"],
        "yaml_documents": ["StrictModel", "load_yaml", "located", "save_yaml"],
    },
)
