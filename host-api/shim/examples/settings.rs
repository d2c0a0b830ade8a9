//! Prints the table of settings as it stands in the README.

fn main() {
    print!("{}", baton_host::settings::markdown());
}
