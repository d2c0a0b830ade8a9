//! Cross-process tests of Baton
