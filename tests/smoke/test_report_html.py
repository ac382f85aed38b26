"""The page of `snakemake --report` in a real browser: figures visible, no console error, no request to a network."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

CATEGORIES = {"fig01": "Figures of the paper", "fig03": "Figures of the paper", "figx_spectrum": "Beyond the paper"}

pytestmark = [pytest.mark.slow, pytest.mark.smoke, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def page(clone, tmp_path_factory) -> Path:
    """The report page of the finished smoke run, made without network."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    clone.snakemake("--report", str(path))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A headless Chromium that logs its console and its requests."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver is installed (Debian: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1400,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_page_load_timeout(120)
    yield chrome
    chrome.quit()


def wait_for(browser, css_or_xpath: str):
    """Return the first element that is displayed, within a minute."""
    from selenium.webdriver.support.ui import WebDriverWait

    def displayed(driver):
        return next((e for e in driver.find_elements("xpath", css_or_xpath) if e.is_displayed()), None)

    return WebDriverWait(browser, 60).until(displayed, f"{css_or_xpath} did not appear")


def open_figure(browser, page: Path, figure: str):
    """Open the page afresh, go to the figure's line, press the eye and return the image."""
    browser.get("about:blank")
    browser.get(page.as_uri())
    wait_for(browser, f"//*[normalize-space(text())='{CATEGORIES[figure]}']").click()
    line = f"//tr[.//td[normalize-space()='{figure}']]"
    wait_for(browser, f"{line}//*[self::a or self::button]").click()
    return wait_for(browser, f"//img[contains(@src, '{figure}.png')]")


@pytest.mark.parametrize("figure", CATEGORIES)
def test_figures_are_visible(browser, page, figure):
    from selenium.webdriver.support.ui import WebDriverWait

    image = open_figure(browser, page, figure)
    WebDriverWait(browser, 60).until(lambda _: image.get_property("complete"))
    assert image.get_property("naturalWidth") > 500
    assert image.size["width"] > 100
    assert image.size["height"] > 100


def test_every_figure_has_its_caption(page, clone):
    text = page.read_text(encoding="utf-8")
    drawn = sorted((clone.root / "results/smoke/figures").glob("*.png"))
    assert len(drawn) >= 12
    for path in drawn:
        assert f"results/smoke/figures/{path.stem}.txt" in text


def test_no_error_on_the_console_and_no_request_leaves_the_machine(browser, page):
    open_figure(browser, page, "fig03")
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    assert any(url.startswith("file://") for url in urls)  # the log works
    assert [url for url in urls if not url.startswith(("file://", "data:", "blob:"))] == []
