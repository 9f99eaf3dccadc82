//! `sync-lock completions`: for a shell.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Failure;
use crate::cli::output::print;

/// Print completions for a shell
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The shell
    shell: Shell,
}

pub(crate) fn run<Program: CommandFactory>(arguments: &Arguments) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut Program::command(), "sync-lock", &mut script);
    print(&String::from_utf8_lossy(&script))
}
