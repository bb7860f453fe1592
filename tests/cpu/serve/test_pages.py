"""Truth, metrics and the live page; the page in a real browser, without any outside resource."""

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import websockets.sync.client
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from serving_fakes import FakePolicy, Running, observation, wait_until

from innerloop.client import RemoteError, RemotePolicy
from innerloop.serve.pages import PAGE, png

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def get(server, path):
    with urllib.request.urlopen(server.http + path) as answer:
        return answer.read()


@pytest.fixture(scope="module")
def used():
    """A server that has answered two robots and refused a late request."""
    with Running(FakePolicy(delay=0.004, precision_requested="bf16")) as server:
        server.ready()
        with (
            RemotePolicy(server.url, session="left arm") as left,
            RemotePolicy(server.url, session="<b>right</b>") as right,
        ):
            for number in range(40):
                left.infer(observation(number, size=224), episode=3)
                right.infer(observation(number, size=96))
            with pytest.raises(RemoteError):
                left.infer(observation(1), deadline_ms=0.5)
            left.infer(observation(1, size=224))
            yield server


def test_the_truth_says_what_really_runs(used):
    truth = json.loads(get(used, "/truth"))
    assert truth["metadata"]["fingerprint"] == "f00d"
    assert truth["metadata"]["cameras"] == ["base", "wrist"]
    assert (truth["metadata"]["state_dim"], truth["metadata"]["action_dim"], truth["metadata"]["horizon"]) == (8, 7, 10)
    assert (truth["running"]["precision"], truth["running"]["kernels"], truth["running"]["device"]) == (
        "fp32",
        "reference",
        "cpu",
    )
    assert truth["options"]["host"] == "127.0.0.1"
    assert truth["options"]["token"] is False
    assert truth["memory"]["host_peak_bytes"] > 1 << 20
    assert json.loads(get(used, "/metadata")) == truth["metadata"]


def test_metrics_count_what_happened(used):
    families = {family.name: family for family in text_string_to_metric_families(get(used, "/metrics").decode())}
    outcomes = {
        s.labels["outcome"]: s.value for s in families["innerloop_requests"].samples if s.name.endswith("_total")
    }
    assert outcomes == {"ok": 81, "late": 1}
    misses = [s.value for s in families["innerloop_deadline_misses"].samples if s.name.endswith("_total")]
    assert misses == [1]
    counts = {
        s.labels["stage"]: s.value for s in families["innerloop_stage_seconds"].samples if s.name.endswith("_count")
    }
    assert counts["infer"] >= 81
    assert counts["policy.action"] == 81
    assert families["innerloop_sessions"].samples[0].value == 2
    assert families["innerloop_clients"].samples[0].value == 2


def test_a_frame_is_the_picture_the_robot_sent(used):
    query = urllib.parse.urlencode({"session": "left arm", "camera": "wrist"})
    picture = np.asarray(Image.open(BytesIO(get(used, f"/frame?{query}"))))
    np.testing.assert_array_equal(picture, observation(1, size=224)["images"]["wrist"])


def test_large_and_float_pictures_become_small_ones():
    gradient = np.linspace(0, 1, 700 * 1100 * 3, dtype=np.float32).reshape(700, 1100, 3)
    picture = np.asarray(Image.open(BytesIO(png(gradient))))
    assert picture.shape == (175, 275, 3)
    np.testing.assert_array_equal(picture, (gradient[::4, ::4] * 255).astype(np.uint8))


def test_the_page_names_no_outside_resource():
    text = PAGE.decode()
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=\"(?!data:)", text)


class Browser:
    """Headless Chromium over its DevTools socket."""

    def __init__(self, folder: Path) -> None:
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            "--disable-background-networking",
        ]
        self._process = subprocess.Popen(
            [CHROMIUM, *options, "--window-size=1280,1400", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        address = folder / "DevToolsActivePort"
        wait_until(address.exists, 30)
        wait_until(lambda: address.read_text().count("\n") >= 1)
        with urllib.request.urlopen(f"http://127.0.0.1:{address.read_text().split()[0]}/json") as answer:
            target = next(each for each in json.load(answer) if each["type"] == "page")
        self._exit = websockets.sync.client.connect(target["webSocketDebuggerUrl"], max_size=None)
        self._socket = self._exit.__enter__()
        self._number = 0
        self.requested: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Network", "Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method, **parameters):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=20))
            if message.get("id") == self._number:
                return message["result"]
            self._note(message)

    def _note(self, message):
        if message["method"] == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        if message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(message["params"]["exceptionDetails"]["text"])
        if message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(str(message["params"]["entry"]))

    def value(self, expression):
        return self.command("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def close(self):
        self._exit.__exit__(None, None, None)
        self._process.terminate()
        self._process.wait(10)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_the_page_in_a_browser(used, tmp_path):
    browser = Browser(tmp_path)
    try:
        browser.command("Page.navigate", url=used.http + "/")
        wait_until(lambda: browser.value("document.getElementById('state').textContent") == "ready", 20)
        wait_until(lambda: browser.value("[...document.images].every((i) => i.complete && i.naturalWidth)"), 10)
        time.sleep(1.2)  # two more refreshes
        text = browser.value("document.body.innerText")
        words = ("left arm", "<b>right</b>", "policy.vision", "late", "fp32", "f00d")
        assert [word for word in words if word not in text] == []
        assert browser.value("document.querySelectorAll('figure').length") == 4
        width = "document.querySelector('figure img').naturalWidth"  # 0 while the next picture is on its way
        wait_until(lambda: browser.value(width) == 224, 5)
        assert browser.value("document.querySelector('polyline').getAttribute('points').split(' ').length") == 81
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert {urllib.parse.urlsplit(url).netloc for url in browser.requested} == {
            urllib.parse.urlsplit(used.http).netloc
        }
        assert browser.complaints == []
        for name, width in (("wide", 1280), ("phone", 390)):
            browser.command(
                "Emulation.setDeviceMetricsOverride", width=width, height=1400, deviceScaleFactor=1, mobile=False
            )
            time.sleep(0.3)
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
            shot = base64.b64decode(browser.command("Page.captureScreenshot")["data"])
            (tmp_path / f"{name}.png").write_bytes(shot)
            assert len(np.unique(np.asarray(Image.open(BytesIO(shot)).convert("L")))) > 50
    finally:
        browser.close()
