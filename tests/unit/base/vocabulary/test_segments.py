"""The variable that makes segments expand, next to what the user has set."""

import pytest

from shardwise.base.vocabulary.segments import expanding_segments, fixed_segments, segments_expand

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
ON = "expandable_segments:True"


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {NEW: ON}),
        ({NEW: ""}, {NEW: ON}),
        ({NEW: "max_split_size_mb:128"}, {NEW: f"max_split_size_mb:128,{ON}"}),
        ({OLD: "roundup_power2_divisions:[64:8, >:1]"}, {OLD: f"roundup_power2_divisions:[64:8,>:1],{ON}"}),
        # torch reads the old name first, also if it is empty.
        ({OLD: "max_split_size_mb:128", NEW: ON}, {OLD: f"max_split_size_mb:128,{ON}"}),
        ({OLD: "", NEW: ON}, {OLD: ON}),
        ({NEW: ON}, {}),
        ({OLD: f" max_split_size_mb:128, {ON}"}, {}),
        ({OLD: "expandable_segments:False"}, {}),
        ({NEW: "backend:cudaMallocAsync"}, {}),
    ],
)
def test_a_setting_of_the_user_wins_and_others_are_kept(given: dict[str, str], added: dict[str, str]) -> None:
    assert expanding_segments(given) == added
    after = {**given, **added}
    assert expanding_segments(after) == {}
    assert segments_expand(after) == (bool(added) or ON in "".join(given.values()))
    assert not added or not segments_expand(given)


def test_fixed_segments_keep_the_other_settings() -> None:
    assert fixed_segments({OLD: f"max_split_size_mb:128,{ON}"}) == "max_split_size_mb:128,expandable_segments:False"
    assert not segments_expand({OLD: fixed_segments({})})
