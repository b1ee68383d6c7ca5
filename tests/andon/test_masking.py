"""Secrets never reach the store; numbers of training do."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.masking import (
    MASK,
    mask_command,
    mask_environment,
    mask_lines,
    mask_text,
    mask_value,
    read_lines,
)
from tests import secrets
from tests.secrets import Case

S = "Zq7" + "x9K" * 12  # stands for a secret; no test expects it to survive

SECRETS_IN_TEXT = [
    f"export HF_TOKEN=hf_{S}",
    f"WANDB_API_KEY={S}",
    f"AWS_SECRET_ACCESS_KEY: {S}",
    f'{{"aws_secret_access_key": "{S}"}}',
    f"{{'password': '{S}'}}",
    f"DB_PASSWORD = '{S} with blanks'",
    f"python train.py --api-key {S} --lr 3e-4",
    f"python train.py --wandb-token={S}",
    f"Authorization: Bearer {S}",
    f"curl -H 'authorization: token {S}' https://api",
    f"postgresql://andon:{S}@db.internal:5432/andon",
    f"redis://:{S}@cache:6379/0",
    f"https://bucket.s3.amazonaws.com/k?X-Amz-Signature={S}&X-Amz-Date=1",
    f"GET /data?access_token={S}",
    f"ghp_{S}",
    f"glpat-{S}",
    f"xoxb-{S}",
    f"sk-{S}",
    f"whsec_{S}",
    f"eyJhbGciOi.eyJzdWIiOi{S}.sig{S}",
    f"https://hooks.slack.com/services/T0/B0/{S}",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{S}\n-----END OPENSSH PRIVATE KEY-----",
    f"MASTER_PASSPHRASE={S}",
    f"azure: AccountKey={S};EndpointSuffix=core",
    f"client_secret => {S}",
]


@pytest.mark.parametrize("text", SECRETS_IN_TEXT)
def test_a_secret_in_text_is_masked(text: str) -> None:
    masked = mask_text(text)
    assert S not in masked
    assert MASK in masked
    assert mask_text(masked) == masked
    assert S.encode() not in b"".join(mask_lines(line.encode() for line in text.splitlines(keepends=True)))


@pytest.mark.parametrize("case", secrets.texts(), ids=lambda case: case.name[:60])
def test_no_secret_of_the_corpus_survives(case: Case) -> None:
    masked = mask_text(case.text)
    assert case.left_in(masked) == []
    assert mask_text(masked) == masked
    by_line = b"".join(mask_lines(line.encode() for line in case.text.splitlines(keepends=True)))
    assert case.left_in(by_line.decode()) == []
    assert case.left_in(str(mask_value({"message": case.text, "lines": case.text.splitlines()}))) == []


@pytest.mark.parametrize("text", secrets.ordinary())
def test_ordinary_text_is_left_as_it_is(text: str) -> None:
    assert mask_text(text) == text
    assert list(mask_lines([f"{text}\n".encode()])) == [f"{text}\n".encode()]


def test_a_launch_is_masked_and_what_explains_it_stays() -> None:
    launch, case = secrets.launch()
    masked = mask_value(launch)
    assert case.left_in(json.dumps(masked, ensure_ascii=False)) == []
    assert masked["config"]["tracking"]["numeric_password"] == MASK
    same = ("PATH", "RANK", "WORLD_SIZE", "NCCL_DEBUG", "MAX_TOKENS", "HF_HOME", "SLURM_JOB_ID")
    assert [masked["env"][name] for name in same] == [launch["env"][name] for name in same]
    assert mask_environment(launch["env"]) == masked["env"]
    for name in ("lr", "tokens_per_batch", "pad_token", "eos_token_id", "revision", "model"):
        assert masked["config"][name] == launch["config"][name]
    assert masked["argv"][:6] == launch["argv"][:6]
    assert masked["argv"][-2:] == ["--key-dim", "64"]
    assert masked["environment"]["image"] == launch["environment"]["image"]
    assert masked["config"]["secrets"][1] == {"name": "NCCL_DEBUG", "value": "WARN"}
    assert masked["git"]["diff"].endswith("lr = 3e-4\n")


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        (["sshpass", "-p", S, "ssh", "n7", "-p", "22"], ["sshpass", "-p", MASK, "ssh", "n7", "-p", MASK]),
        (
            ["/usr/bin/curl", "-u", f"mira:{S}", "https://h"],
            ["/usr/bin/curl", "-u", f"mira:{MASK}", "https://h"],
        ),
        (["mysql", "-u", "root", f"-p{S}"], ["mysql", "-u", "root", f"-p{MASK}"]),
        (["train.py", "-p", "4"], ["train.py", "-p", "4"]),
    ],
)
def test_short_options_are_secret_where_the_program_says_so(words: list[str], masked: list[str]) -> None:
    assert mask_command(words) == masked


def test_a_log_that_begins_inside_a_key_loses_the_key() -> None:
    key = [f"{S}{S[:20]}\n".encode() for _ in range(5)]
    log = [*key, b"-----END PRIVATE KEY-----\n", b"after\n"]
    assert b"".join(mask_lines(log)) == f"{MASK}\nafter\n".encode()
    assert b"".join(mask_lines([*key, b"step: 1\n"])) == b"".join([*key, b"step: 1\n"])


def test_a_word_is_in_one_piece_of_a_very_long_line() -> None:
    for shift in range(0, 40, 7):
        line = b"a " * ((1 << 19) - 20) + b"b" * shift + b" token=" + S.encode() + b" c" * 1000
        pieces = list(read_lines(io.BytesIO(line), len(line)))
        assert len(pieces) > 1
        assert b"".join(pieces) == line
        assert S.encode()[:10] not in b"".join(mask_lines(pieces))


def test_known_shapes_are_masked_without_a_name() -> None:
    for text in ("key AKIAIOSFODNN7EXAMPLE used", f"see hf_{'a' * 34} in log", f"AIza{'b' * 35}"):
        assert MASK in mask_text(text), text


@pytest.mark.parametrize(
    "text",
    [
        "step: 10 loss:  2.8186 grad_norm:  0.2686 tps: 152,515 tokens: 4096",
        "tokens per second 1234, pad_token=<pad>, max_tokens=4096, num_token = 12",
        '{"tokens": 1048576, "consumed_samples": 307200, "token": 5}',
        "NCCL INFO Channel 00/32 : 0 1 2 3",
        "rank 3: nonfinite loss at step 1000, sample json/decoder.py@256",
        "https://host/path:80/x@y",
        "[2026-01-02 03:04:05] iteration 1200/ 5000 | learning rate: 3.0E-04 | loss scale: 1.0 |",
        "password=None secret: null",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask_text(text) == text


def test_environment_keeps_names_and_harmless_values() -> None:
    masked = mask_environment(
        {"HF_TOKEN": S, "PGPASSWORD": "1234", "PATH": "/bin", "MAX_TOKENS": "5", "URL": f"https://u:{S}@h/"}
    )
    assert masked == {
        "HF_TOKEN": MASK,
        "PGPASSWORD": MASK,
        "PATH": "/bin",
        "MAX_TOKENS": "5",
        "URL": f"https://u:{MASK}@h/",
    }


def test_a_command_line_is_masked_where_the_value_is_its_own_word() -> None:
    words = ["train", "--api-key", S, "--lr", "0.1", "--password", "--verbose", f"--token={S}"]
    assert mask_command(words) == [
        "train",
        "--api-key",
        MASK,
        "--lr",
        "0.1",
        "--password",
        "--verbose",
        f"--token={MASK}",
    ]


def test_documents_are_masked_by_name_at_any_depth() -> None:
    document = {
        "env": {"SECRET": S, "N": 4},
        "argv": ["x", "--api-key", S],
        "list": [{"private_key": S}, f"Bearer {S}"],
        "tokens": 12,
        "token": 12,
        "passwords": None,
    }
    masked = mask_value(document)
    assert S not in repr(masked)
    assert (masked["env"]["N"], masked["tokens"], masked["token"]) == (4, 12, 12)


def test_a_key_over_several_lines_is_one_mask_and_the_log_goes_on() -> None:
    log = [
        b"before\n",
        b"-----BEGIN RSA PRIVATE KEY-----\n",
        f"{S}\n".encode(),
        b"-----END RSA PRIVATE KEY-----\n",
        b"after\n",
    ]
    masked = b"".join(mask_lines(log))
    assert S.encode() not in masked
    assert masked.startswith(b"before\n")
    assert masked.endswith(b"after\n")


@given(st.binary(max_size=300))
def test_bytes_that_are_no_text_go_through_or_are_masked_but_never_fail(raw: bytes) -> None:
    b"".join(mask_lines([raw]))


@given(st.text(max_size=100))
def test_masking_twice_is_masking_once(text: str) -> None:
    once = mask_text(text)
    assert mask_text(once) == once
