"""Events on the wire: what is read, what is refused and why, and what comes out again."""

import json
import math
from time import perf_counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.wire import (
    EVENT_TYPES,
    WireError,
    decode_events,
    encode_events,
    fold_ranks,
    parse_ranks,
)

JSON = "application/json"
STEP_NS = 1_767_323_045_000_000_000


def one(body: bytes | str | dict, kind: str = JSON):
    raw = (
        json.dumps(body).encode()
        if isinstance(body, dict)
        else body.encode()
        if isinstance(body, str)
        else body
    )
    decoded = decode_events(raw, kind)
    assert not decoded.refused
    assert len(decoded.events) == 1
    return decoded.events[0][1]


def refused(body: bytes | str | dict, kind: str = JSON) -> WireError:
    with pytest.raises(WireError) as raised:
        one(body, kind)
    return raised.value


def step(**data):
    return {"type": "step", "step": 5, "data": data}


class TestForms:
    def test_one_event(self):
        event = one({"type": "step", "step": 7, "rank": 3, "node": "n1", "attempt": 2, "data": {"loss": 2.5}})
        assert (event.type, event.step, event.rank, event.node, event.attempt) == ("step", 7, 3, "n1", 2)
        assert event.data == {"loss": 2.5}
        assert event.flags == {}

    def test_an_array_is_taken_event_by_event(self):
        body = json.dumps(
            [step(loss=1), {"type": "step", "step": -1}, 7, {"type": ""}, step(loss="x"), step(loss=2)]
        )
        decoded = decode_events(body.encode(), JSON)
        assert [index for index, _ in decoded.events] == [0, 5]
        assert [(r.index, r.field) for r in decoded.refused] == [
            (1, "step"),
            (2, "body"),
            (3, "type"),
            (4, "data.loss"),
        ]

    def test_ndjson_skips_blank_lines_and_names_the_broken_one(self):
        body = b'{"type":"step","step":1}\n\n  \r\n{"type":"st\n{"type":"step","step":3,"data":{"loss":NaN}}'
        decoded = decode_events(body, "application/x-ndjson; charset=utf-8")
        assert [(i, e.step) for i, e in decoded.events] == [(0, 1), (2, 3)]
        assert [(r.index, r.field) for r in decoded.refused] == [(1, "body")]

    def test_a_structured_cloudevent(self):
        event = one(
            {
                "specversion": "1.0",
                "id": "e1",
                "source": "/trainer",
                "type": "andon.step",
                "time": "2026-01-02T03:04:05Z",
                "subject": "x",
                "data": {"step": 9, "rank": 1, "node": "n", "attempt": 2, "data": {"loss": "nan"}},
            },
            "application/cloudevents+json",
        )
        assert (event.type, event.step, event.rank, event.attempt) == ("step", 9, 1, 2)
        assert event.occurred_ns == STEP_NS
        assert event.flags == {"data.loss": "nan"}
        assert event.extra == {"specversion": "1.0", "id": "e1", "source": "/trainer", "subject": "x"}

    def test_a_batch_of_cloudevents_with_and_without_prefix(self):
        base = {"specversion": "1.0", "id": "e", "source": "s", "data": {"step": 1}}
        batch = [
            {**base, "type": "step"},
            {**base, "type": "andon.heartbeat"},
            {**base, "specversion": "0.3", "type": "step"},
        ]
        decoded = decode_events(json.dumps(batch).encode(), "application/cloudevents-batch+json")
        assert [e.type for _, e in decoded.events] == ["step", "heartbeat"]
        assert [(r.index, r.field) for r in decoded.refused] == [(2, "specversion")]

    @pytest.mark.parametrize(
        "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"]
    )
    def test_another_content_type_is_415(self, kind):
        assert refused({"type": "step", "step": 1}, kind).status == 415

    @pytest.mark.parametrize(
        "body", [b"", b" \n", b"{", b'{"type": "step" "step": 1}', b"\xff\xfe{", b"{} {}", b"nul"]
    )
    def test_what_is_not_json_is_400(self, body):
        error = refused(body)
        assert (error.status, error.field) == (400, "body")

    def test_only_broken_lines_are_400_too(self):
        assert refused(b"{\n[\n", "application/x-ndjson").status == 400

    def test_nothing_that_could_be_taken_is_422_with_the_reason_of_each(self):
        error = refused(json.dumps([{"type": "step", "step": -1}, {"type": "step"}]))
        assert (error.status, error.field) == (422, "step")
        assert [r.index for r in error.refused] == [0, 1]

    def test_an_empty_array_is_422(self):
        assert refused(b"[]").status == 422

    def test_a_byte_order_mark_is_passed_over(self):
        assert one(b'\xef\xbb\xbf{"type": "step", "step": 1}').step == 1

    def test_later_duplicates_of_a_key_win_like_in_the_database(self):
        assert one(b'{"type":"step","step":1,"step":2}').step == 2
        assert one(b'{"type":"step","step":1,"step":2,"data":{"loss":NaN}}').step == 2

    def test_unknown_types_and_keys_are_kept(self):
        event = one({"type": "my.own", "colour": "red", "data": {"a": [1, {"b": 2}]}})
        assert (event.type, event.known) == ("my.own", False)
        assert event.extra == {"colour": "red"}
        assert event.data == {"a": [1, {"b": 2}]}

    def test_all_types_of_the_contract_are_known(self):
        assert len(EVENT_TYPES) == 29
        for kind in EVENT_TYPES - {"action", "step"}:
            assert one({"type": kind}).known


class TestNonfinite:
    @pytest.mark.parametrize(
        ("text", "flag"),
        [
            ("NaN", "nan"),
            ("Infinity", "+inf"),
            ("-Infinity", "-inf"),
            ('"nan"', "nan"),
            ('"NAN"', "nan"),
            ('"-nan"', "nan"),
            ('"Inf"', "+inf"),
            ('"INFINITY"', "+inf"),
            ('"-inf"', "-inf"),
            ('"-Infinity"', "-inf"),
            ("1e999", "+inf"),
            ("-1e999", "-inf"),
            ("1" + "0" * 400, "+inf"),
            ("-1" + "0" * 5000, "-inf"),
        ],
    )
    @pytest.mark.parametrize(
        "name", ["loss", "grad_norm", "lr", "loss_scale", "step_time_s", "router_z_loss"]
    )
    def test_it_becomes_null_with_a_flag(self, name, text, flag):
        event = one(f'{{"type":"step","step":1,"data":{{"{name}":{text},"tokens":5}}}}')
        assert event.data == {name: None, "tokens": 5}
        assert event.flags == {f"data.{name}": flag}

    def test_null_is_not_measured_and_has_no_flag(self):
        event = one(step(loss=None))
        assert event.data == {"loss": None}
        assert event.flags == {}

    def test_text_elsewhere_stays_text(self):
        event = one({"type": "node.state", "node": "nan", "data": {"state": "inf", "inner": {"loss": "nan"}}})
        assert (event.node, event.data) == ("nan", {"state": "inf", "inner": {"loss": "nan"}})
        assert event.flags == {}

    def test_a_spelled_loss_of_another_type_of_event_counts(self):
        event = one({"type": "skip", "step": 3, "data": {"loss": "NaN"}})
        assert event.flags == {"data.loss": "nan"}

    def test_nested_nonfinite_numbers_are_flagged_with_their_path(self):
        event = one(b'{"type":"x","y":[Infinity],"data":{"a":{"b":[1,NaN]},"c":-1e400}}')
        assert event.data == {"a": {"b": [1, None]}, "c": None}
        assert event.flags == {"y[0]": "+inf", "data.a.b[1]": "nan", "data.c": "-inf"}

    @pytest.mark.parametrize("value", ["2.5", "abc", "", True, [1], {}])
    def test_a_loss_that_is_no_number_is_refused(self, value):
        assert refused(step(loss=value)).field == "data.loss"

    def test_millions_of_nan_do_not_become_millions_of_flags(self):
        event = one(b'{"type":"x","data":{"a":[' + b",".join([b"NaN"] * 5000) + b"]}}")
        assert event.data["a"] == [None] * 5000
        assert len(event.flags) == 1001
        assert event.flags["…"] == "4000 more"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("loss", -1),
            ("loss", -1.0),
            ("grad_norm", 0),
            ("grad_norm", 0.0),
            ("grad_norm", -1.0),
            ("loss_scale", -1.0),
        ],
    )
    def test_the_sentinels_of_known_loggers_are_not_measured(self, name, value):
        event = one(step(**{name: value}))
        assert event.data == {name: None}
        assert event.flags == {f"data.{name}": "not_measured"}

    @pytest.mark.parametrize(
        ("name", "value"),
        [("loss", 0.0), ("loss", -0.5), ("grad_norm", 1e-12), ("lr", 0.0), ("step_time_s", -1.0)],
    )
    def test_other_small_numbers_are_values(self, name, value):
        event = one(step(**{name: value}))
        assert event.data == {name: value}
        assert event.flags == {}


class TestFields:
    @pytest.mark.parametrize("value", [0, 2**63 - 1, 12.0])
    def test_a_step_may_be(self, value):
        assert one({"type": "step", "step": value}).step == int(value)

    @pytest.mark.parametrize("value", [-1, 2**63, 10**30, 1.5, "7", True, float("nan"), [1], 1e300])
    def test_a_step_may_not_be(self, value):
        error = refused(json.dumps({"type": "step", "step": value}))
        assert (error.status, error.field) == (422, "step")

    def test_a_step_event_needs_one(self):
        assert refused({"type": "step"}).field == "step"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("rank", -1),
            ("rank", 2**31),
            ("rank", "3"),
            ("attempt", 0),
            ("attempt", -3),
            ("attempt", 2**31),
            ("node", ""),
            ("node", 5),
            ("node", "n" * 256),
            ("data", [1]),
            ("type", None),
            ("type", "t" * 101),
        ],
    )
    def test_a_wrong_field_is_named(self, name, value):
        error = refused({"type": "step", "step": 1, name: value})
        assert (error.status, error.field) == (422, name)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tokens", -1),
            ("tokens", 1.5),
            ("consumed_samples", 2**63),
            ("directive_seq", "a"),
            ("nonfinite", True),
            ("nonfinite", 128),
            ("nonfinite", -1),
            ("nonfinite", "nan"),
            ("skipped", 2),
            ("skipped", "yes"),
            ("view", "shard"),
        ],
    )
    def test_a_wrong_datum_of_a_step_is_named(self, name, value):
        assert refused(step(**{name: value})).field == f"data.{name}"

    def test_nul_and_surrogates_become_the_replacement_character_and_are_counted(self):
        body = b'{"type":"x","node":"a\\u0000b","data":{"k\\ud800":"\\udc00\\u0000","fine":"\\ud83d\\ude00"}}'
        decoded = decode_events(body, JSON)
        event = decoded.events[0][1]
        assert event.node == "a\ufffdb"
        assert event.data == {"k\ufffd": "\ufffd\ufffd", "fine": "😀"}
        assert decoded.replaced == 4
        assert event.flags["node"] == "replaced"

    def test_a_path_of_flags_holds_nothing_that_a_key_may_not(self):
        event = one(r'{"type": "step", "step": 1, "data": {"a\u0000": {"b\ud800": NaN, "c": "\u0000"}}}')
        assert event.flags == {
            "data.a\ufffd.b\ufffd": "nan",
            "data.a\ufffd.c": "replaced",
            "data.a\ufffd": "replaced",
        }

    def test_surrogates_and_nul_as_raw_bytes_too(self):
        event = one(b'{"type":"x","node":"a\x00\xed\xa0\x80"}')
        assert event.node == "a\ufffd\ufffd"

    def test_integers_beyond_64_bits_stay_numbers(self):
        event = one(b'{"type":"x","data":{"big":123456789012345678901234567890}}')
        assert event.data == {"big": 1.2345678901234568e29}
        assert event.flags == {"data.big": "rounded"}


class TestNesting:
    def nested(self, levels: int) -> bytes:
        return b'{"type":"x","data":{"a":' + b"[" * levels + b"1" + b"]" * levels + b"}}"

    def test_32_levels_are_taken_and_33_are_422(self):
        assert one(self.nested(30)).data["a"]
        error = refused(self.nested(31))
        assert (error.status, error.problem_type) == (422, "nested-too-deep")

    @pytest.mark.parametrize(
        "body",
        [
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"[" * 100_000 + b"]" * 100_000,
            b'{"type":"x","data":' + b"[NaN," * 100_000,
        ],
    )
    def test_a_hundred_thousand_brackets_are_422(self, body):
        assert refused(body).status == 422

    def test_deep_nesting_of_one_event_does_not_cost_the_others(self):
        body = b"[" + self.nested(40) + b',{"type":"step","step":1}]'
        decoded = decode_events(body, JSON)
        assert [i for i, _ in decoded.events] == [1]
        assert [r.index for r in decoded.refused] == [0]


class TestRanks:
    @pytest.mark.parametrize(
        ("value", "ranks"),
        [
            (5, (5,)),
            ([3, 1, 1], (1, 3)),
            ("0-3,6", (0, 1, 2, 3, 6)),
            ("7", (7,)),
            (["0-1", 5], (0, 1, 5)),
            ("2147483647", (2147483647,)),
        ],
    )
    def test_a_set_may_be_a_number_a_list_or_ranges(self, value, ranks):
        assert one({"type": "step", "step": 1, "ranks": value}).ranks == ranks

    @pytest.mark.parametrize(
        "value",
        [
            "",
            "a",
            "3-1",
            "-1",
            "0-999999999999",
            "0-2147483648",
            "1,,2",
            [],
            [True],
            [1.5],
            {},
            "0-3;5",
            "٣",
            "0-" + "9" * 4000,
        ],
    )
    def test_what_is_no_set_is_refused(self, value):
        error = refused({"type": "step", "step": 1, "ranks": value})
        assert (error.status, error.field) == (422, "ranks")

    def test_a_post_cannot_expand_without_end(self):
        events = [{"type": "step", "step": 1, "ranks": f"{n}-{n + 200_000}"} for n in range(50)]
        decoded = decode_events(json.dumps(events).encode(), JSON)
        assert len(decoded.events) == 5
        assert {r.field for r in decoded.refused} == {"ranks"}

    def test_the_same_set_again_is_free(self):
        events = [{"type": "step", "step": n, "ranks": "0-200000"} for n in range(50)]
        assert len(decode_events(json.dumps(events).encode(), JSON).events) == 50

    @given(st.sets(st.integers(0, 300), min_size=1))
    def test_folding_and_parsing_are_inverse(self, ranks):
        assert parse_ranks(fold_ranks(sorted(ranks))) == tuple(sorted(ranks))


class TestTimes:
    @pytest.mark.parametrize(
        ("value", "ns"),
        [
            ("2026-01-02T03:04:05Z", STEP_NS),
            ("2026-01-02t03:04:05.000000001z", STEP_NS + 1),
            ("2026-01-02 04:34:05.5+01:30", STEP_NS + 500_000_000),
            ("2026-01-01T19:04:05-08:00", STEP_NS),
            ("2016-12-31T23:59:60Z", 1_483_228_800_000_000_000),
            ("2026-01-02T03:04:05.1234567891234Z", STEP_NS + 123_456_789),
            (1767323045, STEP_NS),
            (1767323045.25, STEP_NS + 250_000_000),
            (0, 0),
            (STEP_NS, STEP_NS),
            (10**17, 10**17),
        ],
    )
    def test_a_time_may_be(self, value, ns):
        event = one({"type": "step", "step": 1, "time": value})
        assert event.occurred_ns == ns
        assert "time" not in event.flags

    def test_no_offset_is_utc_and_flagged(self):
        event = one({"type": "step", "step": 1, "time": "2026-01-02T03:04:05"})
        assert (event.occurred_ns, event.flags) == (STEP_NS, {"time": "no_offset"})

    def test_no_time_is_none(self):
        assert one({"type": "step", "step": 1}).occurred_ns is None
        assert one({"type": "step", "step": 1, "time": None}).occurred_ns is None

    @pytest.mark.parametrize(
        "value",
        [
            1e11, 1767323045000, 1767323045000000, 99_999_999_999_999_999, 2**63, 1e300, -1, "", "yesterday",
            "2026-13-01T00:00:00Z",
            "2026-02-30T00:00:00Z", "2026-01-02T24:00:00Z", "1969-12-31T23:59:59Z",
            "2300-01-01T00:00:00Z", "2026-01-02T03:04:05+99:00",
            "2026-01-02", "1767323045", True, [], {}, "0000-01-01T00:00:00Z", "２０２６-01-02T03:04:05Z",
        ],
    )  # fmt: skip
    def test_a_time_may_not_be(self, value):
        error = refused({"type": "step", "step": 1, "time": value})
        assert (error.status, error.field) == (422, "time")

    def test_a_nan_is_no_time(self):
        assert refused(b'{"type":"step","step":1,"time":NaN}').field == "time"
        assert refused(b'{"type":"step","step":1,"time":1e999}').field == "time"


class TestViews:
    def test_a_single_rank_speaks_for_itself(self):
        event = one(
            {"type": "step", "step": 1, "rank": 0, "data": {"loss": 1, "grad_norm": 1, "nonfinite": 2}}
        )
        assert event.view == "local"
        assert (event.view_of("loss"), event.view_of("nonfinite"), event.view_of("grad_norm")) == (
            "local",
            "local",
            "reduced",
        )

    @pytest.mark.parametrize("who", [{}, {"ranks": "0-3"}, {"ranks": [2]}, {"rank": 0, "ranks": "0-3"}])
    def test_everybody_else_speaks_of_what_was_reduced(self, who):
        event = one({"type": "step", "step": 1, **who, "data": {"loss": 1, "nonfinite": 4}})
        assert event.view == "reduced"
        assert event.view_of("nonfinite") == "reduced"

    def test_what_was_said_wins(self):
        event = one({"type": "step", "step": 1, "data": {"grad_norm": 2, "view": "local"}})
        assert (event.view, event.view_of("grad_norm")) == ("local", "local")

    @pytest.mark.parametrize(
        ("bits", "view"),
        [(8, "reduced"), (16 | 32, "reduced"), (64 | 8, "reduced"), (1, "local"), (4 | 8, "local")],
    )
    def test_bits_without_an_origin_are_reduced_whatever_was_said(self, bits, view):
        event = one({"type": "step", "step": 1, "rank": 3, "data": {"nonfinite": bits, "view": "local"}})
        assert event.view_of("nonfinite") == view


class TestKnownTypes:
    def test_a_launch_has_its_rank_sets_expanded(self):
        event = one(
            {
                "type": "attempt.launched",
                "data": {
                    "world_size": 4,
                    "nodes": [
                        {"node": "a", "ranks": "0-1", "gpu_uuids": ["GPU-1"]},
                        {"node": "b", "ranks": [2, 3]},
                    ],
                    "groups": {"dp": "0-3", "tp": ["0-1", "2-3"], "pp": [[0, 2], [1, 3]], "cp": [0, 1]},
                },
            }
        )
        assert [node["ranks"] for node in event.data["nodes"]] == [[0, 1], [2, 3]]
        assert event.data["groups"] == {
            "dp": [[0, 1, 2, 3]],
            "tp": [[0, 1], [2, 3]],
            "pp": [[0, 2], [1, 3]],
            "cp": [[0, 1]],
        }

    @pytest.mark.parametrize(
        ("data", "field"),
        [
            ({"nodes": {}}, "data.nodes"),
            ({"nodes": [{"ranks": "0"}]}, "data.nodes[0].node"),
            ({"nodes": [{"node": "a", "ranks": "x"}]}, "data.nodes[0].ranks"),
            ({"nodes": [{"node": "a", "gpu_uuids": [1]}]}, "data.nodes[0].gpu_uuids"),
            ({"groups": {"tp": ["0-1", "y"]}}, "data.groups.tp[1]"),
            ({"groups": []}, "data.groups"),
            ({"world_size": -4}, "data.world_size"),
        ],
    )
    def test_a_wrong_part_of_a_launch_is_named(self, data, field):
        assert refused({"type": "attempt.launched", "data": data}).field == field

    COMPLETE = {
        "action": "rollback", "ranks": "0-3", "loader_before": 100, "loader_after": 60,
        "checkpoint": "step-900", "reason": "spike", "detector": "spike/1",
    }  # fmt: skip

    def test_a_complete_action_is_taken(self):
        event = one({"type": "action", "step": 1000, "data": self.COMPLETE})
        assert event.data["ranks"] == [0, 1, 2, 3]

    @pytest.mark.parametrize("name", ["ranks", "loader_before", "loader_after", "checkpoint"])
    @pytest.mark.parametrize("how", ["absent", "null"])
    def test_an_action_without_a_part_is_refused_unless_it_says_why(self, name, how):
        data = {key: value for key, value in self.COMPLETE.items() if key != name}
        if how == "null":
            data[name] = None
        event = {"type": "action", "step": 1000, "data": data}
        assert refused(event).field == f"data.{name}"
        data["reason_none"] = {name: "  "}
        assert refused(event).field == f"data.{name}"
        data["reason_none"] = {name: "the run has none"}
        assert one(event).data["reason_none"] == {name: "the run has none"}

    def test_an_action_without_a_step_is_refused_unless_it_says_why(self):
        assert refused({"type": "action", "data": self.COMPLETE}).field == "step"
        assert one({"type": "action", "data": {**self.COMPLETE, "reason_none": {"step": "before the first"}}})

    def test_the_position_zero_is_a_position(self):
        assert one(
            {
                "type": "action",
                "step": 0,
                "rank": 0,
                "data": {**self.COMPLETE, "loader_before": 0, "loader_after": 0},
            }
        )

    def test_one_reason_covers_both_loader_positions(self):
        data = {
            **self.COMPLETE,
            "loader_before": None,
            "loader_after": None,
            "reason_none": {"loader": "streaming"},
        }
        assert one({"type": "action", "step": 1, "data": data})

    def test_an_acknowledgement(self):
        event = one({"type": "directive.ack", "data": {"seq": 4, "step": 9, "state": "held", "ranks": "0-1"}})
        assert event.data["ranks"] == [0, 1]
        assert refused({"type": "directive.ack", "data": {"state": "maybe"}}).field == "data.state"


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["nan", "-inf", "0-3", "step"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=15,
)
FIELDS = ["type", "step", "rank", "ranks", "node", "attempt", "time", "data"]
LOOSE_EVENTS = st.dictionaries(st.sampled_from([*FIELDS, "extra"]), JSON_VALUES) | JSON_VALUES
KINDS = [
    "application/json",
    "application/x-ndjson",
    "application/cloudevents+json",
    "application/cloudevents-batch+json",
]


def check_outcome(body: bytes, kind: str) -> None:
    """The post is refused with a field, or what was taken can be written as JSON that jsonb takes too."""

    def no_constant(token):
        raise AssertionError(f"bare {token} written")

    try:
        decoded = decode_events(body, kind)
    except WireError as error:
        problem = error
    else:
        problem = None
    if problem is not None:
        assert problem.status in (400, 422)
        assert problem.field
        return

    for _, event in decoded.events:
        text = msgspec.json.encode(event).decode()
        json.loads(text, parse_constant=no_constant)
        assert "\\u0000" not in text


class TestHostileInput:
    @settings(max_examples=300)
    @given(st.binary(max_size=200), st.sampled_from(KINDS))
    def test_no_bytes_make_anything_but_a_wire_error(self, body, kind):
        check_outcome(body, kind)

    @settings(max_examples=500)
    @given(LOOSE_EVENTS | st.lists(LOOSE_EVENTS, max_size=4), st.sampled_from(KINDS))
    def test_no_json_makes_anything_but_a_wire_error(self, value, kind):
        check_outcome(json.dumps(value).encode("utf-8", "surrogatepass"), kind)

    @given(st.text(alphabet='{}[]":,0123456789.eE+-NaInfity\\ud8tru \n', max_size=80))
    def test_no_near_json_makes_anything_but_a_wire_error(self, text):
        check_outcome(b'{"type":"step","step":1,"data":{"a":' + text.encode() + b"}}", JSON)


class TestWriting:
    @given(
        st.lists(
            st.fixed_dictionaries(
                {"type": st.just("step"), "step": st.integers(0, 2**63 - 1)},
                optional={
                    "rank": st.integers(0, 2**31 - 1),
                    "node": st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20),
                    "data": st.dictionaries(
                        st.sampled_from(["lr", "eval_loss", "loss", "step_time_s"]), st.floats()
                    ),
                },
            ),
            min_size=1,
            max_size=5,
        )
    )
    def test_what_the_client_writes_is_valid_json_and_reads_back(self, events):
        body = encode_events(events)
        json.loads(body, parse_constant=pytest.fail)
        decoded = decode_events(body, JSON)
        assert len(decoded.events) == len(events)
        for (_, event), sent in zip(decoded.events, events, strict=True):
            assert (event.step, event.rank, event.node) == (sent["step"], sent.get("rank"), sent.get("node"))
            for name, value in sent.get("data", {}).items():
                if math.isfinite(value):
                    assert event.data[name] == value or event.flags[f"data.{name}"] == "not_measured"
                else:
                    expected = "nan" if math.isnan(value) else "+inf" if value > 0 else "-inf"
                    assert event.flags[f"data.{name}"] == expected

    def test_numpy_values_are_written_as_numbers(self):
        import numpy as np

        body = encode_events(
            [{"type": "step", "step": np.int64(3), "data": {"loss": np.float32("nan"), "x": np.arange(2)}}]
        )
        assert json.loads(body) == {"type": "step", "step": 3, "data": {"loss": "nan", "x": [0, 1]}}

    def test_what_is_no_json_is_a_type_error(self):
        loop: list = []
        loop.append(loop)
        for bad in (object(), loop):
            with pytest.raises(TypeError):
                encode_events([{"type": "x", "data": {"a": bad}}])


def test_a_small_event_is_read_in_well_under_forty_microseconds():
    body = (
        b'{"type":"step","step":123,"rank":3,"node":"n1","time":"2026-01-02T03:04:05Z",'
        b'"data":{"loss":2.345,"grad_norm":0.31}}'
    )
    best = math.inf
    for _ in range(20):
        begin = perf_counter()
        for _ in range(100):
            decode_events(body, JSON)
        best = min(best, (perf_counter() - begin) / 100)
    assert best < 40e-6
