"""The console in a real browser, against a real broker. Takes the screenshots in docs/images.

Needs Debian's chromium and chromium-driver, which `make test` installs when it may.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from multibroker.web.tokens import FILE_NAME, admin_token
from tests.integration.process import ROOT, BrokerProcess

try:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait
except ImportError:
    webdriver = None  # type: ignore[assignment]

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SCREENSHOTS = os.environ.get("CONSOLE_SCREENSHOTS")
XSS = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
WAIT_SECS = 20


def browser(directory: Path, dark: bool = False) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1280,900",
        f"--user-data-dir={directory}",
    ):
        options.add_argument(argument)
    if dark:
        options.add_argument("--force-dark-mode")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


class ConsoleTests(SynchronousTestCase):
    if webdriver is None or CHROMIUM is None or DRIVER is None:
        skip = "chromium and chromium-driver are not installed, so the console is not driven"

    def setUp(self) -> None:
        directory = Path(self.mktemp()).resolve()
        directory.mkdir(parents=True)
        wires = ("http", "figg", "tank", "blipmq", "reliable")
        self.broker = BrokerProcess(
            directory, *(f"--{wire}=tcp:0:interface=127.0.0.1" for wire in wires)
        )
        self.broker.start()
        self.addCleanup(self.broker.kill)
        self.token = admin_token(self.broker.data_dir / FILE_NAME)
        self.url = f"http://127.0.0.1:{self.broker.ports['http']}"
        self.page = browser(directory / "chromium")
        self.addCleanup(self.page.quit)

    # What a person does.

    def see(self, text: str, where: str = "body") -> None:
        self.until(lambda: text in self.page.find_element(By.CSS_SELECTOR, where).text, text)

    def until(self, happens: Callable[[], Any], what: str) -> Any:
        def look(_: Any) -> Any:
            try:
                return happens()
            except Exception as error:
                if type(error).__module__.startswith("selenium"):
                    return False
                raise

        shown = self.page.find_element(By.TAG_NAME, "body").text
        return WebDriverWait(self.page, WAIT_SECS).until(look, f"never saw {what!r}, but: {shown}")

    def press(self, text: str, where: str = "main") -> None:
        buttons = self.page.find_elements(By.CSS_SELECTOR, f"{where} button")
        next(button for button in buttons if button.text == text).click()

    def fill(self, name: str, text: str) -> Any:
        field = self.page.find_element(By.CSS_SELECTOR, f"[name={name}]")
        field.clear()
        field.send_keys(text)
        return field

    def screenshot(self, name: str) -> None:
        if SCREENSHOTS:
            # trial works in a folder of its own
            path = ROOT / SCREENSHOTS / f"console-{name}.png"
            self.assertTrue(self.page.save_screenshot(str(path)), path)

    def log_in(self) -> None:
        self.page.find_element(By.ID, "access").click()
        self.fill("token", str(self.token)).send_keys(Keys.ENTER)
        self.see("Log out", "header")

    def publish(self, topic: str, payload: str) -> None:
        """Somebody else publishes."""
        request = urllib.request.Request(
            f"{self.url}/api/topics/{topic}/messages",
            json.dumps({"payload": payload}).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {self.token}"},
        )
        urllib.request.urlopen(request, timeout=WAIT_SECS).close()

    def some_traffic(self) -> None:
        """Twenty seconds of it, for charts that show something."""
        for step in range(100):
            for topic, each in (("orders", 5), ("payments", 2)):
                for _ in range(step % (each * 4) // 4):
                    self.publish(topic, "{}")
            time.sleep(0.2)

    def test_from_an_empty_broker_to_a_message_in_the_live_tail(self) -> None:
        self.page.get(self.url)
        self.see("ready", "#phase")
        self.see("No topics yet")

        self.fill("name", "orders")
        self.press("Create topic")
        self.see("admin role", "#login-problem")
        self.fill("token", "not the token at all")
        self.press("Log in", "#login")
        self.see("may only read", "#login-problem")
        self.fill("token", str(self.token))
        self.press("Log in", "#login")
        self.see("Log out", "header")

        self.press("Create topic")
        self.see("orders", "main h1")
        self.see("Live messages")
        self.until(lambda: self.page.find_elements(By.NAME, "payload"), "the form")
        self.fill("payload", XSS)
        self.fill("key", "k1")
        self.press("Publish")
        self.see(XSS, ".tail")
        self.see("key k1", ".tail")
        self.assertEqual(self.page.title, "orders · multibroker")
        self.assertEqual(self.page.find_elements(By.CSS_SELECTOR, ".tail img, .tail script"), [])

        for number in range(8):
            self.publish("orders", json.dumps({"order": number, "total": number * 3.5}))
        self.see('"order": 7', ".tail")
        self.screenshot("topic")

        self.press("Pause")
        self.publish("orders", "while it was paused")
        self.press("Resume")
        self.see("while it was paused", ".tail")
        self.no_errors()

    def test_lists_dark_mode_a_phone_and_the_keyboard(self) -> None:
        for topic in ("orders", "payments", "a%2Fb%20%FF"):
            for number in range(5):
                self.publish(topic, f"message {number}")
        self.page.get(self.url)
        self.see("payments")
        self.see("a/b \\xff")
        if SCREENSHOTS:
            self.some_traffic()
        self.screenshot("topics")
        for name in ("consumers", "connections", "log"):
            self.page.get(f"{self.url}/#/{name}")
            self.until(lambda: self.page.find_elements(By.CSS_SELECTOR, "main .card *"), name)
        self.page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
        )
        self.page.get(f"{self.url}/#/topic/orders")
        self.see("Live messages")
        ground = self.page.execute_script("return getComputedStyle(document.body).backgroundColor")
        self.assertEqual(ground, "rgb(17, 22, 28)")
        self.screenshot("dark")
        self.page.set_window_size(400, 850)
        self.page.get(f"{self.url}/#/")
        self.see("payments")
        width = self.page.execute_script("return document.documentElement.scrollWidth")
        self.assertLessEqual(width, 520)
        self.screenshot("phone")
        self.page.get(self.url)
        self.see("payments")
        self.press_tab()
        self.assertEqual(self.page.switch_to.active_element.text, "Skip to content")
        while self.page.switch_to.active_element.text != "orders":
            self.press_tab()
        self.page.execute_script("window.drawn = document.querySelector('main table')")
        gone = "return !window.drawn.isConnected"
        self.until(lambda: self.page.execute_script(gone), "the next tick")
        self.assertEqual(self.page.switch_to.active_element.text, "orders")
        self.no_errors()

    def press_tab(self) -> None:
        webdriver.ActionChains(self.page).send_keys(Keys.TAB).perform()

    def no_errors(self) -> None:
        """Nothing was refused by the content security policy, nothing threw."""
        entries = [entry for entry in self.page.get_log("browser") if entry["level"] == "SEVERE"]
        # A refused request (no token yet) is logged by the browser itself.
        entries = [entry for entry in entries if "403" not in entry["message"]]
        self.assertEqual(entries, [])
