//! A new migration folder is otherwise not noticed by an incremental build.

fn main() {
    println!("cargo::rerun-if-changed=migrations");
}
