//! The fake must be right, or what is proved with it is not.

mod data;
mod ends;
mod errors;
mod events;
mod rules;
mod vram;
