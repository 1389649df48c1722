import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.results import some_run, synthetic_result, write_results
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import Result, result_to_json
from qmargin.report.systems import arrange, load_panels


def without_hash(result: Result) -> Result:
    return replace(result, protocol=replace(result.protocol, data_sha256=None))


def test_results_on_the_same_trials_share_a_panel_and_keep_their_order() -> None:
    panels = arrange(
        [
            synthetic_result("B"),
            synthetic_result("A", protocol="IJB-C"),
            synthetic_result("A", seed=1),
        ]
    )
    assert [panel.title for panel in panels] == ["VoxCeleb1-H", "IJB-C"]
    assert [entry.label for entry in panels[0].entries] == ["B", "A"]
    assert [panel.index for panel in panels] == [0, 1]
    assert panels[1].entries[0].colour == panels[0].entries[1].colour  # both are A


def test_equal_names_are_told_apart() -> None:
    (panel,) = arrange([synthetic_result("A", seed=seed) for seed in range(3)])
    assert [entry.label for entry in panel.entries] == ["A", "A (2)", "A (3)"]
    (panel,) = arrange([synthetic_result("A", run=some_run(seed=seed)) for seed in (4, 7)])
    assert [entry.label for entry in panel.entries] == ["A, seed 4", "A, seed 7"]
    assert [entry.colour for entry in panel.entries] == [0, 1]
    (panel,) = arrange([synthetic_result(name) for name in ("A", "A (2)", "A")])
    assert len({entry.label for entry in panel.entries}) == 3


def test_other_trials_under_one_name_are_another_panel() -> None:
    panels = arrange([synthetic_result(), synthetic_result(num_genuine=1999)])
    assert [panel.title for panel in panels] == [
        "VoxCeleb1-H, trial set 1",
        "VoxCeleb1-H, trial set 2",
    ]


def test_equal_trials_under_two_names_are_one_panel() -> None:
    first, second = synthetic_result("A"), synthetic_result("B", seed=1)
    renamed = replace(second, protocol=replace(second.protocol, name="b"))
    (panel,) = arrange([first, renamed])
    assert panel.title == "202,000 common trials"


def test_without_a_hash_the_name_and_the_counts_tell_trials_apart() -> None:
    first = without_hash(synthetic_result("A"))
    second = without_hash(synthetic_result("B"))
    assert len(arrange([first, second])) == 1
    assert len(arrange([first, without_hash(synthetic_result("C", protocol="x"))])) == 2


def test_headline_is_the_strictest_far_with_enough_data_for_all() -> None:
    (panel,) = arrange([synthetic_result(num_impostors=400_000)])  # 40 allowed at 1e-4, 4 at 1e-5
    assert panel.headline_far == 1e-4
    (panel,) = arrange([synthetic_result(num_impostors=2_000)])  # 20 at 1e-2, 2 at 1e-3, then none
    assert panel.headline_far == 1e-3
    (panel,) = arrange([synthetic_result(num_impostors=50)])
    assert panel.headline_far is None


def test_a_headline_that_was_asked_for_is_taken_where_it_was_measured() -> None:
    result = synthetic_result(num_impostors=400_000)
    assert arrange([result], headline=1e-3)[0].headline_far == 1e-3
    assert arrange([result], headline=0.5)[0].headline_far == 1e-4  # nobody measured it


def test_leader_has_the_largest_tar_at_the_headline() -> None:
    (panel,) = arrange(
        [synthetic_result("low", separation=4.5), synthetic_result("high", separation=5.5)]
    )
    assert panel.leader().label == "high"


def test_no_results_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least 1 result"):
        load_panels([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["det"]["far"].append(0.5), "columns of det"),
        (lambda content: content["det"]["frr"].__setitem__(3, 1.5), "outside \\[0, 1\\]"),
        (lambda content: content["det"]["band"]["low"].__setitem__(3, "-inf"), "low is -inf"),
        (lambda content: content["histogram"]["genuine"].pop(), "columns of histogram"),
        (lambda content: content["measures"]["tar"][0].update(far_target=2.0), "target FAR is 2.0"),
        (lambda content: content["protocol"].update(num_impostors=0), "no trials of a kind"),
        (lambda content: content.update(version=99), "version 99"),
    ],
)
def test_files_that_cannot_be_drawn_are_named(tmp_path: Path, change, message: str) -> None:
    (path,) = write_results(tmp_path, synthetic_result())
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        load_panels([path])
    assert str(path) in str(caught.value)


def test_helper_writes_what_the_schema_reads(tmp_path: Path) -> None:
    result = replace(synthetic_result(groups=("a", "b"), keys=("x", "y")), command="c")
    (path,) = write_results(tmp_path, result)
    assert result_to_json(load_panels([path])[0].entries[0].result) == result_to_json(result)
