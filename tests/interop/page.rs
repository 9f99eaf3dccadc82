//! `docs/compatibility.md` names tests that exist.

use std::fs;
use std::path::Path;

#[test]
fn every_test_that_the_page_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = String::new();
    for folder in ["tests/interop", "tests/it"] {
        for file in fs::read_dir(root.join(folder)).unwrap() {
            sources.push_str(&fs::read_to_string(file.unwrap().path()).unwrap());
        }
    }
    let page = fs::read_to_string(root.join("docs/compatibility.md")).unwrap();
    // What stands in backticks and reads as a sentence.
    let named =
        page.split('`').skip(1).step_by(2).filter(|word| word.matches('_').count() > 3 && !word.contains(['.', ' ']));
    let named: Vec<_> = named.filter(|word| word.starts_with(|c: char| c.is_ascii_lowercase())).collect();
    assert!(named.len() > 20, "the page is not read as it is written: {named:?}");
    let missing: Vec<_> = named.into_iter().filter(|name| !sources.contains(&format!("fn {name}("))).collect();
    assert_eq!(missing, Vec::<&str>::new());
}
