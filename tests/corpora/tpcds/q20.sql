-- An item's share of its class in the catalog.
select
  i_item_id, i_item_desc, i_category, i_class, i_current_price,
  sum(cs_ext_sales_price) as itemrevenue,
  sum(cs_ext_sales_price) * 100 / sum(sum(cs_ext_sales_price)) over (partition by i_class)
    as revenueratio
from catalog_sales
join item on i_item_sk = cs_item_sk
join date_dim on d_date_sk = cs_sold_date_sk
where i_category in ('Sports', 'Books', 'Home')
  and d_date between date '1999-02-22' and date '1999-02-22' + interval 30 days
group by i_item_id, i_item_desc, i_category, i_class, i_current_price
order by i_category, i_class, i_item_id, i_item_desc, revenueratio, i_current_price, itemrevenue
limit 100
