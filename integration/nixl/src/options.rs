//! The parameters that NIXL lists for the backend.

use std::collections::BTreeMap;
use std::ffi::OsString;

use baton_host::settings::SETTINGS;
use baton_host::{Choice, SelectError, config_path, select};

/// Every parameter with the value it would have if it were not given. Hosts feed this list back unchanged, so it shows
/// what environment and file say: fed back as a parameter, a bare default would override them. Empty: no value.
pub(crate) fn with_defaults() -> Vec<(&'static str, String)> {
    match chosen(&std::env::vars_os().collect::<Vec<_>>()) {
        Ok(choice) => choice
            .settings()
            .iter()
            .map(|chosen| (chosen.setting.name, chosen.value.clone().unwrap_or_default()))
            .collect(),
        // Creating the backend will say what is wrong with them.
        Err(_) => SETTINGS
            .iter()
            .map(|setting| (setting.name, setting.default.unwrap_or_default().to_owned()))
            .collect(),
    }
}

fn chosen(environment: &[(OsString, OsString)]) -> Result<Choice, SelectError> {
    let none = BTreeMap::new();
    let path = config_path(&none, environment)?;
    let text = match &path {
        None => None,
        Some(path) => Some(
            std::fs::read_to_string(path)
                .map_err(|error| SelectError::Unreadable { path: path.clone(), cause: error.to_string() })?,
        ),
    };
    select(&none, environment, path.as_deref().zip(text.as_deref()))
}
