from shardwise.base.errors import MissingExtra, UnknownName


def test_an_unknown_name_shows_the_nearest_or_all_where_few_are_known() -> None:
    assert str(UnknownName.of("model", "gpt2-125m", known=["gpt2-124m", "vit-base"])) == (
        "unknown model 'gpt2-125m'; did you mean gpt2-124m?"
    )
    assert str(UnknownName.of("goal", "xyz", known=["memory", "throughput"])) == (
        "unknown goal 'xyz'; known: memory, throughput"
    )
    assert str(UnknownName.of("token", "☃", known=map(str, range(100)), see="look there")) == (
        "unknown token '☃'; look there"
    )


def test_a_missing_package_says_what_to_install() -> None:
    error = MissingExtra.of("datasets", needed_for="hf:x", extra="hf")
    assert str(error) == "hf:x needs datasets: pip install 'shardwise[hf]'"
