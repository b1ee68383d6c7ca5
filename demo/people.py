"""A person at a browser, for `make demo CHECK=1`: signs in, reads forms, presses buttons.

Everything goes through the same pages a person uses: the form is taken from the page, filled in and
posted with the page's own hidden fields (CSRF token, the digest that was shown).
"""

import http.cookiejar
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from html.parser import HTMLParser

from demo.stages import StageFailed


@dataclass
class Form:
    """A form of a page: where it posts to and the fields it already holds."""

    action: str
    fields: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # every named control, filled in or not


class _Forms(HTMLParser):
    """Collects the forms of a page and its visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[Form] = []
        self.text: list[str] = []
        self._open = False
        self._select = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.forms.append(Form(values.get("action", "")))
            self._open = True
        elif self._open and "name" in values and tag in {"input", "button", "select", "textarea"}:
            form, name = self.forms[-1], values["name"]
            form.names.append(name)
            if tag == "select":
                self._select = name
            elif values.get("type") in {"checkbox", "radio"}:
                if "checked" in values:
                    form.fields[name] = values.get("value", "on")
            elif tag == "input":
                form.fields[name] = values.get("value", "")
        elif (
            self._select
            and tag == "option"
            and ("selected" in values or self._select not in self._form_fields())
        ):
            self.forms[-1].fields[self._select] = values.get("value", "")

    def _form_fields(self) -> dict[str, str]:
        return self.forms[-1].fields

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._open = False
        elif tag == "select":
            self._select = ""

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(data.strip())


@dataclass
class Page:
    """An answer of the server."""

    url: str
    status: int
    html: str

    def parsed(self) -> _Forms:
        """Return the page's forms and text."""
        reader = _Forms()
        reader.feed(self.html)
        return reader

    @property
    def text(self) -> str:
        """The visible text, blanks folded."""
        return " ".join(" ".join(self.parsed().text).split())

    def form(self, ending: str) -> Form:
        """Return the form whose address ends with `ending`.

        Raises:
            StageFailed: the page has no such form.
        """
        for form in self.parsed().forms:
            if urllib.parse.urlsplit(form.action).path.rstrip("/").endswith(ending):
                return form
        raise StageFailed(f"{self.url} has no form for {ending!r}; it says: {self.text[:300]}")


class Person:
    """Somebody with a browser session of their own."""

    def __init__(self, base_url: str, name: str, password: str) -> None:
        self.base_url, self.name, self.password = base_url, name, password
        self._opener = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        )

    def get(self, path: str) -> Page:
        """Open a page."""
        return self._open(urllib.request.Request(urllib.parse.urljoin(self.base_url, path)))

    def submit(self, page: Page, ending: str, **filled: str) -> Page:
        """Fill in the form of `page` whose address ends with `ending` and press its button."""
        form = page.form(ending)
        unknown = set(filled) - set(form.names)
        if unknown:
            raise StageFailed(f"the form {form.action} has no field {', '.join(sorted(unknown))}")
        target = urllib.parse.urljoin(page.url, form.action or page.url)
        body = urllib.parse.urlencode({**form.fields, **filled}).encode()
        request = urllib.request.Request(target, data=body, method="POST")
        request.add_header("Referer", page.url)  # what a browser sends, and what CSRF checks on https
        return self._open(request)

    def sign_in(self) -> Page:
        """Sign in and return the first page."""
        page = self.submit(self.get("/sign-in"), "/sign-in", username=self.name, password=self.password)
        if "/sign-in" in page.url:
            raise StageFailed(f"{self.name} could not sign in: {page.text[:200]}")
        return page

    def _open(self, request: urllib.request.Request) -> Page:
        try:
            with self._opener.open(request, timeout=30) as answer:
                return Page(answer.geturl(), answer.status, answer.read().decode("utf-8"))
        except urllib.error.HTTPError as error:
            return Page(error.geturl(), error.code, error.read().decode("utf-8", errors="replace"))
