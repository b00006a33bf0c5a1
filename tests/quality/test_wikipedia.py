import bz2

from toolkit.quality.wikipedia import articles, plain_text

# markup, text
EXAMPLES = {
    "links": ("A [[cat|feline]] and a [[dog]].", "A feline and a dog."),
    "emphasis": ("''Italic'' and '''bold'''.", "Italic and bold."),
    "templates": ("Born {{birth date|1900|1|1|note={{x}}}} here.", "Born here."),
    "an emptied bracket": ("Achilles ({{lang|el|x}}) was Greek.", "Achilles was Greek."),
    "a bracket's first word": ("Apollo ({{lang|el|x}}, {{y}}, Apollon) shone.", "Apollo (Apollon) shone."),
    "references": ('True.<ref name="a">{{cite|x}} See [[y]].</ref> Also<ref name="a"/> so.', "True. Also so."),
    "a table": ('Before.\n\n{| class="t"\n|-\n| cell || [[x]]\n|}\n\nAfter.', "Before.\n\nAfter."),
    "a picture": ("[[File:x.jpg|thumb|A [[cat]], {{by|me}}]]Text.", "Text."),
    "categories": ("Text.\n[[Category:Cats]]\n[[fr:Chat]]", "Text."),
    "a title with a colon": ("See [[Alien: Resurrection]].", "See Alien: Resurrection."),
    "external links": ("At [http://x.org the site].", "At the site."),
    "entities": ("5&nbsp;km &ndash; far &amp; wide", "5 km – far & wide"),
    "headings": (
        "Lead.\n\n== History ==\nOld.\n\n=== Early ===\nOlder.",
        "Lead.\n\nHistory\n\nOld.\n\nEarly\n\nOlder.",
    ),
    "comments": ("Seen<!-- unseen -->.", "Seen."),
    "a formula": ("So <math>x^2</math> holds.", "So holds."),
    "a list": ("* one\n* two", "one\n\ntwo"),
    "broken markup": ("Text.\n\n| bgcolor=lime | [[Open|W\n\nMore.", "Text.\n\nMore."),
    "nothing": ("{{stub}}", ""),
}


def test_examples():
    for what, (markup, text) in EXAMPLES.items():
        assert plain_text(markup) == text, what


def test_sections_of_links_go_with_their_subsections_and_others_stay():
    markup = "Lead.\n== See also ==\n* [[x]]\n=== Books ===\n* y\n== Legacy ==\nStays.\n==References==\n{{reflist}}"
    assert plain_text(markup) == "Lead.\n\nLegacy\n\nStays."


def test_pages_of_a_dump(tmp_path):
    page = "<page><title>{}</title><ns>{}</ns>{}<revision><text>{}</text></revision></page>"
    pages = [
        page.format("Kept", 0, "", "Some ''text''."),
        page.format("Marked", 0, '<redirect title="Kept"/>', "x"),
        page.format("Redirect", 0, "", "#REDIRECT [[Kept]]"),
        page.format("Talk", 1, "", "Chat."),
        page.format("Empty", 0, "", "{{stub}}"),
        page.format("Also kept", 0, "", "More."),
    ]
    dump = tmp_path / "dump.bz2"
    dump.write_bytes(bz2.compress(f"<mediawiki xmlns='http://x/'>{''.join(pages)}</mediawiki>".encode()))
    assert list(articles(dump)) == [("Kept", "Some text."), ("Also kept", "More.")]
