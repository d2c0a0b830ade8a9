//! Derives from `src/types.rs` and `src/table.rs`, the truth of the interface, what has to follow it: the list
//! of fields that both doors compare, the check that nothing has padding, and the mirror of the table that the
//! layout check of the Rust door walks.

use std::collections::BTreeMap;
use std::path::Path;
use std::{env, fs};

use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote};
use syn::visit_mut::{self, VisitMut};
use syn::{Field, File, Ident, Item, ItemStruct, Type};

const TABLE: &str = "BatonEngineV1";
/// The last field of the table that every engine of this major has, by definition of the format.
const LAST_HEADER_FIELD: &str = "fields_count";

fn main() {
    let mut aliases = Aliases::default();
    let mut structs = Vec::new();
    for name in ["codes.rs", "types.rs", "table.rs"] {
        let path = Path::new("src").join(name);
        println!("cargo::rerun-if-changed={}", path.display());
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        collect(file, &mut aliases, &mut structs);
    }
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    write(&out, "fields.rs", fields(&aliases, &structs));
    let table = structs.iter().find(|s| s.ident == TABLE).expect("the table is in src/table.rs");
    write(&out, "unsupported.rs", unsupported(table));
    if env::var_os("CARGO_FEATURE_STABLE_ABI").is_some() {
        write(&out, "mirror.rs", mirror(&aliases, table));
    }
}

fn write(out: &str, name: &str, tokens: TokenStream) {
    let path = Path::new(out).join(name);
    fs::write(&path, tokens.to_string()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

fn collect(file: File, aliases: &mut Aliases, structs: &mut Vec<ItemStruct>) {
    for item in file.items {
        match item {
            Item::Type(alias) => {
                aliases.0.insert(alias.ident, *alias.ty);
            }
            Item::Struct(item) if is_repr_c(&item) && !is_opaque(&item) => structs.push(item),
            _ => {}
        }
    }
}

fn is_repr_c(item: &ItemStruct) -> bool {
    item.attrs.iter().any(|a| a.path().is_ident("repr") && a.to_token_stream().to_string().contains("(C)"))
}

fn is_opaque(item: &ItemStruct) -> bool {
    item.fields.iter().all(|f| f.ident.as_ref().is_none_or(|i| i.to_string().starts_with('_')))
}

/// Type aliases are written out in every description: changing one changes the interface.
#[derive(Default)]
struct Aliases(BTreeMap<Ident, Type>);

impl VisitMut for &Aliases {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        let target = match ty {
            Type::Path(path) if path.qself.is_none() => {
                path.path.segments.last().and_then(|s| self.0.get(&s.ident))
            }
            _ => None,
        };
        if let Some(target) = target {
            *ty = target.clone();
        }
        visit_mut::visit_type_mut(self, ty);
    }
}

impl Aliases {
    fn resolve(&self, ty: &Type) -> Type {
        let mut ty = ty.clone();
        let mut visitor = self;
        visitor.visit_type_mut(&mut ty);
        ty
    }

    /// The type as text: aliases written out, no names of arguments, no spaces.
    fn signature(&self, ty: &Type) -> String {
        struct NoNames;
        impl VisitMut for NoNames {
            fn visit_bare_fn_arg_mut(&mut self, arg: &mut syn::BareFnArg) {
                arg.name = None;
                visit_mut::visit_bare_fn_arg_mut(self, arg);
            }
        }
        let mut ty = self.resolve(ty);
        NoNames.visit_type_mut(&mut ty);
        let text: String = ty.to_token_stream().to_string().split_whitespace().collect();
        text.replace("core::ffi::", "").replace(",)", ")")
    }
}

fn named(field: &Field) -> &Ident {
    field.ident.as_ref().expect("structures of the interface have named fields")
}

fn fields(aliases: &Aliases, structs: &[ItemStruct]) -> TokenStream {
    let mut entries = Vec::new();
    let mut checks = Vec::new();
    for item in structs {
        let owner = &item.ident;
        let types: Vec<_> = item.fields.iter().map(|f| &f.ty).collect();
        let message = format!("{owner} has padding");
        checks.push(quote! {
            const _: () = assert!(#(size_of::<#types>())+* == size_of::<#owner>(), #message);
        });
        for field in &item.fields {
            let (ident, ty) = (named(field), &field.ty);
            let name = format!("{owner}.{ident}");
            let signature = aliases.signature(ty);
            entries.push(quote! {
                BatonField {
                    name: BatonSlice::from_static(#name),
                    signature: BatonSlice::from_static(#signature),
                    offset_bytes: core::mem::offset_of!(#owner, #ident) as u32,
                    size_bytes: size_of::<#ty>() as u32,
                },
            });
        }
    }
    let names = structs
        .iter()
        .flat_map(|item| item.fields.iter().map(|field| format!("{}.{}", item.ident, named(field))));
    let sizes = structs.iter().map(|item| {
        let (owner, name) = (&item.ident, item.ident.to_string());
        quote! { (#name, size_of::<#owner>()), }
    });
    quote! {
        /// Every field of every structure of this interface, structures in the order of their declaration.
        pub const FIELDS: &[BatonField] = &[#(#entries)*];
        /// The names in [`FIELDS`], one for one.
        pub const FIELD_NAMES: &[&str] = &[#(#names),*];
        /// Name and size of every structure of this interface.
        pub const STRUCT_SIZES: &[(&str, usize)] = &[#(#sizes)*];
        #(#checks)*
    }
}

/// A table in which every entry answers that it is not offered: what stands in for entries an engine lacks.
fn unsupported(table: &ItemStruct) -> TokenStream {
    let entries = table.fields.iter().filter_map(|field| {
        let Type::BareFn(function) = &field.ty else { return None };
        let (ident, inputs) = (named(field), function.inputs.iter().map(|arg| &arg.ty));
        Some(quote! {
            #ident: {
                unsafe extern "C" fn #ident(#(_: #inputs),*) -> BatonStatus {
                    BATON_ERR_UNSUPPORTED
                }
                #ident
            },
        })
    });
    quote! {
        /// A table in which every entry answers `BATON_ERR_UNSUPPORTED`.
        pub const UNSUPPORTED_TABLE: BatonEngineV1 = BatonEngineV1 {
            magic: BATON_TABLE_MAGIC,
            abi_major: BATON_ABI_MAJOR,
            abi_minor: BATON_ABI_MINOR,
            size_bytes: size_of::<BatonEngineV1>() as u64,
            engine_name: BatonSlice::EMPTY,
            engine_version: BatonSlice::EMPTY,
            fields: FIELDS.as_ptr(),
            fields_count: FIELDS.len() as u64,
            #(#entries)*
        };
    }
}

/// The layout check reads function pointers only where they are fields. A parameter that is one gets a
/// transparent wrapper, which has the same calling convention.
fn mirror(aliases: &Aliases, table: &ItemStruct) -> TokenStream {
    struct WrapHooks;
    impl VisitMut for WrapHooks {
        fn visit_bare_fn_arg_mut(&mut self, arg: &mut syn::BareFnArg) {
            if arg.ty.to_token_stream().to_string().contains("BatonEventFn") {
                arg.ty = syn::parse_quote!(EventHook);
            }
        }
    }
    let hook = aliases.resolve(&syn::parse_quote!(BatonEventFn));
    let fields = table.fields.iter().map(|field| {
        let ident = named(field);
        let mut ty = field.ty.clone();
        WrapHooks.visit_type_mut(&mut ty);
        let doc = format!("See [`{TABLE}::{ident}`].");
        let last = (ident == LAST_HEADER_FIELD).then(|| quote! { #[sabi(last_prefix_field)] });
        quote! { #[doc = #doc] #last pub #ident: #ty, }
    });
    let (prefix_ref, prefix_fields) = (format_ident!("EngineRootV1Ref"), format_ident!("EngineRootV1Prefix"));
    quote! {
        /// An optional event hook as the layout check can read it.
        #[repr(transparent)]
        #[derive(Clone, Copy, abi_stable::StableAbi)]
        pub struct EventHook(pub Option<#hook>);

        /// The root module: field by field the table.
        #[repr(C)]
        #[derive(Clone, Copy, abi_stable::StableAbi)]
        #[sabi(kind(Prefix(prefix_ref = #prefix_ref, prefix_fields = #prefix_fields)))]
        #[sabi(missing_field(option))]
        pub struct EngineRootV1 { #(#fields)* }
    }
}
