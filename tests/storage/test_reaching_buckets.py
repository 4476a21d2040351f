"""How buckets are reached: no longer than it may take, by nobody who cannot, and with secrets that are told
nobody.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore import exceptions

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import ConfigError, StorageError
from orchestrator.storage import buckets
from orchestrator.storage.buckets import CONTENT, DOCUMENT, Limits, redacted
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.object_store import ObjectStore
from orchestrator.storage.tries import problem_code
from tests.checkpoint.samples import no_sleep
from tests.forked import FORKED
from tests.raising import raises
from tests.storage.an_attempt import an_attempt
from tests.storage.servers import Fault, Proxy, new_bucket, reach

pytestmark = pytest.mark.xdist_group("forked")

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAQWERTYUIOPASDFGH",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfi==",
}
# a request that nobody answers is given up soon, and as often as a slow machine may need
IMPATIENT = Limits(request_s=1.0, retry_s=60.0, again_s=60.0)


@pytest.fixture
def proxy(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """With secrets of its own."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return proxy


@pytest.fixture
def root(proxy: Proxy) -> str:
    return f"{new_bucket(proxy.url)}/run"


@pytest.mark.quick("silence")
# ------------------------------------------------------------------------------ limits
@pytest.mark.parametrize("fault", ["silence", "silence after"])
def test_a_server_that_says_nothing_is_asked_again(proxy: Proxy, root: str, fault: Fault) -> None:
    store = ObjectStore(root, no_sleep, IMPATIENT)
    proxy.one_in(fault, "PUT")
    assert store.put("claim", lambda: (b"mine",), 4, exclusive=True)
    assert len(proxy.asked) > 1, "the fault came"
    proxy.one_in(fault, "PUT")
    assert not store.put("claim", lambda: (b"mine",), 4, exclusive=True)
    proxy.one_in(fault, "GET")
    assert store.read("claim", 0, memoryview(bytearray(9))) == 4


def test_a_server_that_says_nothing_more_is_an_error_that_says_what_to_do(proxy: Proxy, root: str) -> None:
    store = ObjectStore(root, no_sleep, Limits(request_s=0.2, retry_s=0.0, again_s=0.0))
    proxy.rule = lambda *_: "silence"
    calls: tuple[Callable[[], object], ...] = (
        lambda: store.put("claim", lambda: (b"mine",), 4, exclusive=True),
        lambda: store.put("x", lambda: (b"mine",), 4),
        lambda: store.facts("x"),
        lambda: store.list(""),
        lambda: store.delete(["x"]),
    )
    for call in calls:
        with raises(StorageError, "storage.timeout", root.removesuffix("/run")):
            call()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:9000"])
def test_a_server_that_cannot_be_reached_is_no_server_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str
) -> None:
    reach(monkeypatch, url, tmp_path)
    buckets.forget_buckets()
    store = ObjectStore("s3://bucket/run", no_sleep, Limits(request_s=1.0, retry_s=0.0, again_s=0.0))
    with raises(StorageError, "storage.unreachable", "s3://bucket/run/x"):
        store.facts("x")
    buckets.forget_buckets()


def test_a_server_without_room_is_known_by_its_status() -> None:
    error = exceptions.GenericError("Server returned non-2xx status code: 507 Insufficient Storage: ")
    assert problem_code(buckets._in_words("s3://b/r", "list and read", error)) == "storage.full"


def test_a_call_ends_within_its_limit_and_a_document_sooner_than_content() -> None:
    for limit_s in (3.0, 8.0, 30.0):
        limits = Limits.within(limit_s)
        assert limits.request_s < limits.again_s, "what nobody answers is asked once more"
        assert limits.request_s + limits.retry_s + limits.again_s == pytest.approx(limit_s)
    assert sum((DOCUMENT.request_s, DOCUMENT.retry_s, DOCUMENT.again_s)) <= 30
    assert CONTENT.again_s > CONTENT.request_s > DOCUMENT.request_s
    store = ObjectStore("s3://bucket/run")
    assert (store._limits_for(100_000), store._limits_for(8 << 20)) == (DOCUMENT, CONTENT)
    assert store.within(6.0)._limits_for(8 << 20) == store.within(6.0).beside("s3://bucket/b")._limits_for(0)


def test_a_folder_is_as_quick_as_its_disk(tmp_path: Path) -> None:
    storage = Storage.on(LocalStore(str(tmp_path))).within(1.0)
    storage.write("x", b"x")
    assert storage.read("x") == b"x"


# ------------------------------------------------------------------------------ forks
def fork_and_read(root: str, answer: object) -> None:
    """In a process of its own: reads, forks, and the child reads."""
    store = ObjectStore(root, no_sleep)
    store.facts("x")
    child = os.fork()
    if child == 0:
        try:
            store.facts("x")
        except BaseException as error:  # noqa: BLE001  the parent reads it
            Path(str(answer)).write_text(f"{getattr(error, 'code', '')}\n{traceback.format_exc()}")
        os._exit(0)
    os.waitpid(child, 0)
    store.facts("x")


def test_a_process_that_was_forked_after_a_bucket_was_reached_hears_why_it_cannot(
    proxy: Proxy, root: str, tmp_path: Path
) -> None:
    ObjectStore(root).put("x", lambda: (b"x",), 1)
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    process = FORKED.Process(target=_in_environment, args=(environment, root, str(tmp_path / "answer")))
    process.start()
    process.join(60)
    assert process.exitcode == 0, "the parent goes on"
    said = (tmp_path / "answer").read_text()
    assert said.startswith("storage.forked_process\n")
    assert 'multiprocessing_context="spawn"' in said


def _in_environment(environment: dict[str, str], root: str, answer: str) -> None:
    os.environ.update(environment)
    fork_and_read(root, answer)


def test_a_process_that_was_forked_before_reaches_buckets(proxy: Proxy, root: str) -> None:
    assert buckets._owner in (None, os.getpid())
    assert Storage.on(ObjectStore(root)).list("") == []


# ------------------------------------------------------------------------------ settings
@pytest.mark.parametrize("value", ["127.0.0.1:5714", "localhost:9000", "http://", "ftp://x", "http:// x"])
def test_an_endpoint_that_is_no_url_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    reach(monkeypatch, "http://127.0.0.1:1", tmp_path)
    for name, uri in (("AWS_ENDPOINT_URL_S3", "s3://b/r"), ("AZURE_STORAGE_ENDPOINT", "az://b/r")):
        monkeypatch.setenv(name, f"root:topsecret@{value}")
        buckets.forget_buckets()
        with raises(ConfigError, "config.storage_endpoint", f"{name}=***@", "http://") as refused:
            RunStore(Storage.on(ObjectStore(uri))).read_run()
        assert "topsecret" not in str(refused.value)
    buckets.forget_buckets()


def test_a_bucket_of_azure_without_an_account_lacks_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    buckets.forget_buckets()
    for uri in ("az://x/y", "abfs://x/y"):
        with raises(StorageError, "storage.denied", f"no credentials for {uri.removesuffix('/y')} ") as said:
            Storage.on(ObjectStore(uri)).read("run.json")
        assert "SKIP_SIGNATURE" not in str(said.value), "a run writes"
    buckets.forget_buckets()


def test_what_the_server_says_is_not_cut_short() -> None:
    said = (
        "Error performing GET " + "x" * 200 + ' - status code: 403 Forbidden: <?xml version="1.0"?>\n<Error>'
    )
    said += "<Code>InvalidAccessKeyId</Code><Message>The key does not exist</Message></Error>"
    error = buckets._in_words("s3://b/r", "list and read", PermissionError(said))
    assert "403 Forbidden: InvalidAccessKeyId: The key does not exist)" in str(error)
    assert "AWS_SKIP_SIGNATURE=true" in str(error), "who reads may read a public one"


# ------------------------------------------------------------------------------ secrets
def test_no_secret_is_in_what_is_stored_pickled_shown_or_said(proxy: Proxy, root: str) -> None:
    told: list[str] = []
    storage = Storage.on(ObjectStore(root, no_sleep))
    an_attempt(storage, lambda *texts: told.extend(texts))
    stored = [storage.read(path) for path in _below(storage, "")]
    assert len(stored) > 5
    proxy.rule = lambda *_: "echo"
    for call in (
        lambda: storage.read("x"),
        lambda: storage.write("y", b"y"),
        lambda: storage.create("z", b"z"),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        # what an error was raised from is shown with it
        told.append("".join(traceback.format_exception(caught.value)))
    assert any("SignatureDoesNotMatch" in text for text in told), "the server's answer is shown"
    everything = [*stored, pickle.dumps(storage), repr(storage).encode(), *(text.encode() for text in told)]
    for secret in (*SECRETS.values(), "AWS4-HMAC-SHA256 Credential"):
        assert not any(secret.encode() in text for text in everything), secret


def _below(storage: Storage, folder: str) -> list[str]:
    paths = [f"{folder}/{name}" if folder else name for name in storage.list(folder)]
    return [below for path in paths for below in (_below(storage, path) or [path])]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "https://a.blob.core.windows.net/c/x?sv=1&sig=abc%2Bdef&se=2",
            "https://a.blob.core.windows.net/c/x?sv=1&sig=***&se=2",
        ),
        (
            "?X-Amz-Signature=0af&X-Amz-Credential=AKIA%2F1&x=1",
            "?X-Amz-Signature=***&X-Amz-Credential=***&x=1",
        ),
        ("Authorization: Bearer ya29.abc-d end", "Authorization: Bearer *** end"),
        ("<AWSAccessKeyId>AKIAX</AWSAccessKeyId>", "<AWSAccessKeyId>***</AWSAccessKeyId>"),
        (
            "AccountName=me;AccountKey=abc==;EndpointSuffix=x",
            "AccountName=me;AccountKey=***;EndpointSuffix=x",
        ),
        (
            "status code: 503, the design of s3://bucket/signature.json",
            "status code: 503, the design of s3://bucket/signature.json",
        ),
    ],
)
def test_what_signs_a_request_is_cut_out_of_texts(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_secret_of_the_environment_is_cut_out_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=mine;AccountKey=c2VjcmV0/w==;X=1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token/of+one")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    text = "c2VjcmV0/w== and token%2Fof%2Bone in eu-central-1"
    assert redacted(text) == "*** and *** in eu-central-1"
