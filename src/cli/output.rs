//! What people read on stdout.

use std::io::{self, Write as _};
use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};

use crate::cli::Failure;

/// Prints text to stdout. A reader who closed the pipe has seen enough; any other failure is reported.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::bug(&error)),
        _ => Ok(()),
    }
}

/// A table with a header and no frame.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
    table
}

/// An age for people, in whole seconds.
pub(crate) fn age(seconds: f64) -> String {
    if seconds < 0.0 {
        return format!("{} ahead", age(-seconds));
    }
    match Duration::try_from_secs_f64(seconds.trunc()) {
        Ok(age) => humantime::format_duration(age).to_string(),
        Err(_) => "unknown".to_owned(),
    }
}

/// Text from the database on a terminal: whatever would move the cursor or turn the line around is shown escaped.
pub(crate) fn shown(text: &str) -> String {
    if text.is_empty() || text.contains(moves_the_cursor) {
        format!("\"{}\"", printable(text))
    } else {
        text.to_owned()
    }
}

/// A line that may hold text from the database.
pub(crate) fn printable(line: &str) -> String {
    let escaped = |c: char| if moves_the_cursor(c) { c.escape_debug().to_string() } else { c.to_string() };
    line.chars().map(escaped).collect()
}

fn moves_the_cursor(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_shown_in_whole_units() {
        assert_eq!(age(0.9), "0s");
        assert_eq!(age(1865.2), "31m 5s");
        assert_eq!(age(-60.0), "1m ahead");
        assert_eq!(age(f64::INFINITY), "unknown");
    }

    #[test]
    fn text_that_would_move_the_cursor_is_escaped() {
        assert_eq!(shown("läuft ✓"), "läuft ✓");
        assert_eq!(shown("a\u{1b}[2Jb"), "\"a\\u{1b}[2Jb\"");
        assert_eq!(shown("a\nb"), "\"a\\nb\"");
        assert_eq!(shown("a\u{202e}b"), "\"a\\u{202e}b\"");
        assert_eq!(shown(""), "\"\"");
    }
}
