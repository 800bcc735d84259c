//! `index.html`: every figure and table with its caption, on one page that asks nothing of the network.

use crate::plot::escape;
use crate::table::{Cell, Table};
use crate::{Drawing, Figure};

const STYLE: &str = "\
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; color: #1b1f24; background: #fff;
  font: 1.0625rem/1.55 Inter, Helvetica, Arial, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .75rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 0 0 .5rem; }
section { border-top: 1px solid #d9dde1; margin-top: 2.5rem; padding-top: 1.75rem; }
h2 span { color: #5c6670; font-weight: 400; }
figure { margin: 0; }
img { display: block; width: 100%; min-width: 42rem; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .75rem 0; }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; border-bottom: 1px solid #eef0f2; white-space: nowrap; }
th { font-weight: 600; }
nav ul { columns: 18rem; list-style: none; padding: 0; }
nav li { margin-bottom: .2rem; break-inside: avoid; }
a { color: #4f34b0; }
code { font: .875em/1.4 ui-monospace, Menlo, Consolas, monospace; background: #f5f6f7; padding: .1em .3em;
  overflow-wrap: anywhere; }
.from { color: #5c6670; font-size: .9375rem; }
";

const INTRODUCTION: &str = "\
<p>Every picture below is drawn from what this crate computes: its formats, its rounding, its random words, its model of \
stalling. What was timed on a GPU or trained is read from files recorded beside it; what others measured is named as \
theirs. Figures 1 to 9 and Tables 1 and 2 have the subjects of those in <cite>When Small Updates Disappear</cite>, the \
companion post of K. Topollai and A. Choromanska, <cite>Understanding Quantization of Optimizer States in LLM \
Pre-training</cite> (arXiv:2603.16731); Figures 10 to 12 and Table 3 are new.</p>
<p>In all of them, a value is rounded <strong style=\"color:#c8453d\">to nearest</strong> or <strong \
style=\"color:#6d4bd6\">stochastically</strong>: up with the probability of the fraction passed. One ulp is the distance \
of two neighbours in the low-precision format. <em>Stalled</em> is a step that leaves the stored value as it was.</p>
<p>All of it again, byte for byte: <code>cargo run --release --example figures</code></p>
";

/// The page.
pub(crate) fn html(drawn: &[(&Figure, Drawing)]) -> String {
    let contents: String = drawn
        .iter()
        .map(|(figure, _)| {
            let (heading, title) = (figure.heading(), escape(figure.title));
            format!("<li><a href=\"#{}\">{heading}</a> {title}</li>\n", anchor(figure))
        })
        .collect();
    let sections: String = drawn.iter().map(|(figure, drawing)| section(figure, drawing)).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>halfulp: figures and tables</title>\n<link rel=\"icon\" href=\"data:,\">\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<header>\n\
         <h1>When updates are smaller than half a ulp</h1>\n{INTRODUCTION}</header>\n\
         <nav aria-label=\"Figures and tables\">\n<ul>\n{contents}</ul>\n</nav>\n<main>\n{sections}</main>\n</body>\n</html>\n"
    )
}

fn anchor(figure: &Figure) -> String {
    figure.heading().to_lowercase().replace(' ', "-")
}

fn section(figure: &Figure, drawing: &Drawing) -> String {
    let Figure { file, title, alt, caption, see, .. } = figure;
    let [title, alt, caption, see] = [title, alt, caption, see].map(|text| escape(text));
    let (shown, pictures) = match &drawing.picture {
        Some(picture) => {
            let (width, height) = picture.size();
            let image = format!(
                "<a href=\"{file}.svg\"><img src=\"{file}.png\" alt=\"{alt}\" width=\"{width}\" height=\"{height}\" \
                 loading=\"lazy\"></a>\n"
            );
            (wide(&image, figure.title), format!("<a href=\"{file}.svg\">SVG</a>, <a href=\"{file}.png\">PNG</a>, "))
        }
        None => (table(drawing.shown(), figure.alt), format!("<a href=\"{file}.md\">Markdown</a>, ")),
    };
    format!(
        "<section id=\"{}\">\n<h2><span>{}</span> {title}</h2>\n<figure>\n{shown}\
         <figcaption>\n<p>{caption}</p>\n<p><strong>What to see.</strong> {see}</p>\n\
         <p class=\"from\">{pictures}<a href=\"{file}.csv\">the numbers</a>, from <code>{}</code></p>\n\
         </figcaption>\n</figure>\n</section>\n",
        anchor(figure),
        figure.heading(),
        figure.command(),
    )
}

fn table(table: &Table, label: &str) -> String {
    let head: String = table.head.iter().map(|cell| format!("<th scope=\"col\">{}</th>", escape(cell))).collect();
    let row = |row: &Vec<Cell>| {
        let cells: String = row.iter().skip(1).map(|cell| format!("<td>{}</td>", escape(&cell.text()))).collect();
        let first = row.first().map(Cell::text).unwrap_or_default();
        format!("<tr><th scope=\"row\">{}</th>{cells}</tr>\n", escape(&first))
    };
    let rows: String = table.rows.iter().map(row).collect();
    let table = format!("<table>\n<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table>\n");
    wide(&table, label)
}

/// What may be wider than a phone and then scrolls by itself.
fn wide(content: &str, label: &str) -> String {
    let label = escape(label);
    format!("<div class=\"wide\" role=\"region\" tabindex=\"0\" aria-label=\"{label}\">\n{content}</div>\n")
}
